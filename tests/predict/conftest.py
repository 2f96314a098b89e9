"""Two devices that have trained."""

import pytest
from animals import CLASSES, settings_of, train_on, write_images


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
    train_on({name: folders / name for name in CLASSES}, settings, tmp_path)
    return tmp_path
