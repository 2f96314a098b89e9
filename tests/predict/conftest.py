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


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """Let another user load the files of a test's runs, from now on."""
    return lambda: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "stranger"))
