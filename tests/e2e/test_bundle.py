"""SuperNodes run the app bundle that they receive, whatever is installed on them."""

from pathlib import Path

import pytest
from devices import write_folders
from environments import make_environment
from federation import Federation, project, read_lines

NAMES = ("without", "other-version")
CONFIG = (
    'algorithm="fedrep" task="image-folder" model="mlp-2" num-clients=2 '
    "fraction-train=1.0 num-server-rounds=1 evaluate-every=0 evaluate-last=0 "
    "min-available-nodes=2 batch-size=6 augment=false head-epochs=1"
)
# Another release, which has no module that could be used
OTHER = "__version__ = '0.0.1'\n__path__ = []\n"


@pytest.mark.e2e
def test_supernodes_need_no_package_and_ignore_another_version(tmp_path: Path) -> None:
    write_folders(tmp_path / "data", len(NAMES))
    folders = sorted((tmp_path / "data").iterdir())
    federation = Federation(tmp_path / "federation")
    try:
        federation.start_superlink()
        for name, data in zip(NAMES, folders, strict=True):
            site = make_environment(tmp_path / name)
            if name == "other-version":
                (site / "flwr_frl.py").write_text(OTHER)
            federation.start_supernode(
                name,
                f'client-name="{name}" data-dir="{data}"',
                warm=False,
                program=tmp_path / name / "bin" / "flower-supernode",
            )
        output = tmp_path / "results"
        log = federation.run(project(), f'{CONFIG} output="{output}"', 600)
    finally:
        federation.close()
    [row] = read_lines(output / "fedrep" / "metrics.jsonl")
    assert row["clients"] == 2, log
