"""Pixels of image files: 16-bit images, and mixed grey and coloured images."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flwr_frl.common.settings import SettingsError
from flwr_frl.task.data.datasets import Dataset, DataSettings, load_dataset
from flwr_frl.task.data.images import channels_of, pixels_of, read_image

GREY, RED = np.full((4, 4), 90, np.uint8), np.full((4, 4, 3), (200, 0, 0), np.uint8)


# Tag 274 is the orientation; 6 requires a clockwise rotation.
ROTATED = Image.Exif()
ROTATED[274] = 6


def load(root: Path, *train: np.ndarray, suffix: str = "png") -> Dataset:
    """Write training images and a grey test image, and load them as a data set."""
    for part, images in (("train", train), ("test", (GREY,))):
        folder = root / "images" / part / "ant"
        folder.mkdir(parents=True)
        for i, pixels in enumerate(images):
            Image.fromarray(pixels).save(folder / f"{i:03d}.{suffix}")
    places = {"data_dir": str(root / "images"), "cache_dir": str(root / "cache")}
    return load_dataset("image-folder", DataSettings(**places))


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_images_of_16_bits_keep_the_upper_8(tmp_path, suffix):
    pixels = np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4)
    if suffix == "tiff":
        pixels = pixels.astype(">u2")
    images = load(tmp_path, pixels).train.images
    assert images.shape == (1, 4, 4, 1)
    assert images.flatten().tolist() == list(range(0, 256, 16))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_images_of_32_bits_are_rejected(tmp_path, dtype):
    message = r"unreadable images: 1; .*numbers of 32 bits \(mode [IF]\); they must"
    with pytest.raises(SettingsError, match=message):
        load(tmp_path, np.ones((4, 4), dtype), suffix="tiff")


@pytest.mark.parametrize(
    "exif", [ROTATED, b"Exif\0\0damaged"], ids=["turned", "damaged"]
)
def test_photographs_are_rotated_by_their_exif_orientation(tmp_path, exif):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (4, 6, 3), dtype=np.uint8)
    for part in ("train", "test"):
        folder = tmp_path / "images" / part / "ant"
        folder.mkdir(parents=True)
        Image.fromarray(pixels).save(folder / "0.png", exif=exif)
    seen = np.rot90(pixels, -1) if exif is ROTATED else pixels
    places = {"data_dir": str(tmp_path / "images"), "cache_dir": str(tmp_path / "c")}
    images = load_dataset("image-folder", DataSettings(**places)).train.images
    np.testing.assert_array_equal(images[0], seen)
    one = read_image(folder / "0.png", 3, seen.shape[1::-1])
    np.testing.assert_array_equal(one, seen)


def test_leading_grey_image_does_not_remove_colours(tmp_path):
    dataset = load(tmp_path, GREY, RED, RED)
    assert dataset.train.images[0].tolist() == np.full((4, 4, 3), 90).tolist()
    assert dataset.train.images[1].tolist() == RED.tolist()
    assert dataset.notes == ()


def test_grey_images_with_transparency_or_palette_stay_grey(tmp_path):
    clear = np.dstack([GREY, np.full((4, 4), 7, np.uint8)])
    images = load(tmp_path, clear).train.images
    assert images.shape == (1, 4, 4, 1)
    assert (images == 90).all()
    place = tmp_path / "palette.png"
    for pixels, channels in ((GREY, 1), (RED, 3)):
        Image.fromarray(pixels).convert("P").save(place)
        with Image.open(place) as image:
            assert image.mode == "P"
            assert channels_of(image) == channels
    grey = Image.fromarray(GREY).convert("P")
    np.testing.assert_array_equal(pixels_of(grey, 1, (4, 4))[..., 0], GREY)


def test_colour_images_that_become_grey_are_counted(tmp_path):
    # Every third of 402 images is inspected: the first, the fourth, ...
    dataset = load(tmp_path, *[GREY] * 400, RED)
    assert dataset.train.images.shape == (401, 4, 4, 1)
    (note,) = dataset.notes
    assert note.startswith("1 of 402 images have colours and become grey")
    assert note.endswith("400.png")
