"""An app of Flower's template on two SuperNodes, with our FedAvg in its ServerApp."""

import shutil
from pathlib import Path

import pytest
from federation import Federation

APP = Path(__file__).parent / "template_app"
CHANGES = {
    "from flwr.serverapp.strategy import FedAvg": (
        "from flwr_frl.strategies import FedAvg"
    ),
    "FedAvg(fraction_evaluate=fraction_evaluate)": (
        "FedAvg(fraction_train=1.0, min_available_nodes=2, "
        "fraction_evaluate=fraction_evaluate)"
    ),
}


@pytest.mark.e2e
def test_the_template_app_trains_on_two_supernodes(
    federation: Federation, tmp_path: Path
) -> None:
    app = tmp_path / "app"
    shutil.copytree(APP, app, ignore=shutil.ignore_patterns("__pycache__"))
    server_app = app / "templateapp" / "server_app.py"
    source = server_app.read_text()
    for old, new in CHANGES.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    server_app.write_text(source)
    federation.start_superlink()
    for i in range(2):
        federation.start_supernode(f"node{i}", f"partition-id={i} num-partitions=2")
    output = federation.run(app, "num-server-rounds=2", 300)
    assert "'evaluated': 2" in output, output
    assert output.count("has no query handler") == 1
    assert "'rejected': 0" in output
    logs = [(tmp_path / f"node{i}.log").read_text() for i in range(2)]
    # Only the node that was asked first has a traceback.
    asked = [log.count("No query function registered") > 0 for log in logs]
    assert sum(asked) == 1
