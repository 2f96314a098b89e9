"""A SuperNode runs the app bundle that it receives, whatever is installed on it."""

from pathlib import Path

import pytest
from devices import write_folders
from environments import make_environment
from federation import Federation, project, read_lines

CONFIG = (
    'algorithm="fedrep" task="image-folder" model="mlp-2" num-clients=1 '
    "fraction-train=1.0 num-server-rounds=1 evaluate-every=0 evaluate-last=0 "
    "min-available-nodes=1 batch-size=6 augment=false head-epochs=1"
)
# Another release, which has no module that could be used
OTHER = "__version__ = '0.0.1'\n__path__ = []\n"


@pytest.mark.e2e
def test_a_supernode_needs_no_package_and_ignores_another_version(
    tmp_path: Path,
) -> None:
    write_folders(tmp_path / "data", clients=1)
    site = make_environment(tmp_path / "environment")
    (site / "flwr_frl.py").write_text(OTHER)
    program = tmp_path / "environment" / "bin" / "flower-supernode"
    node = f'client-name="pi" data-dir="{tmp_path / "data" / "000000"}"'
    output = tmp_path / "results"
    federation = Federation(tmp_path / "federation")
    try:
        federation.start_superlink()
        federation.start_supernode("pi", node, warm=False, program=program)
        log = federation.run(project(), f'{CONFIG} output="{output}"', 600)
    finally:
        federation.close()
    [row] = read_lines(output / "fedrep" / "metrics.jsonl")
    assert row["clients"] == 1, log
