import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def surroundings(tmp_path, monkeypatch):
    """A working directory with invalid data: missing folders and broken images."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("a file")
    for part in ("train", "test"):
        for name in "ab":
            folder = tmp_path / "broken" / part / name
            folder.mkdir(parents=True)
            pixels = np.zeros((16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "0.png")
    for name in "ab":
        (tmp_path / "broken" / "train" / name / "0.png").write_bytes(b"no image")
    monkeypatch.chdir(tmp_path)
    return tmp_path
