"""Two devices that have trained."""

import pytest
from animals import CLASSES, settings_of, write_images

from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies import server_app
from flwr_frl.strategies.grids.simulation import InlineGrid


@pytest.fixture(scope="package")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for seed, (name, classes) in enumerate(CLASSES.items()):
        write_images(root / name, classes, seed)
    return root


@pytest.fixture(scope="package")
def devices(folders, tmp_path_factory):
    """Results of FedRep on two devices, each with its own folder, classes and state."""
    tmp_path = tmp_path_factory.mktemp("devices")
    settings = settings_of(tmp_path, algorithm="fedrep", experiment="animals")
    grid = InlineGrid(make_app(settings), 2)
    for node, name in enumerate(CLASSES, 1):
        grid.contexts[node].node_config = {
            "client-name": name,
            "data-dir": str(folders / name),
            "state-dir": str(tmp_path / name),
        }
    server_app.run(grid, settings)
    return tmp_path
