"""Pixels of image files: 16-bit images, and mixed grey and coloured images."""

import numpy as np
import pytest
from pictures import load, write_images
from PIL import Image
from refusals import refusal

from flwr_frl.task.data.datasets import Dataset, read_image

GREY, RED = np.full((4, 4), 90, np.uint8), np.full((4, 4, 3), (200, 0, 0), np.uint8)
# Tag 274 is the orientation; 6 requires a clockwise rotation.
ROTATED = Image.Exif()
ROTATED[274] = 6


def loaded(root, *train: np.ndarray, suffix: str = "png") -> Dataset:
    """Write training images and a grey test image, and load them as a data set."""
    write_images(root / "images" / "train" / "ant", train, suffix)
    write_images(root / "images" / "test" / "ant", [GREY], suffix)
    return load(root / "images", root)


@pytest.mark.parametrize(("suffix", "dtype"), [("png", "u2"), ("tiff", ">u2")])
def test_images_of_16_bits_keep_the_upper_8(tmp_path, suffix, dtype):
    pixels = np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4).astype(dtype)
    images = loaded(tmp_path, pixels, suffix=suffix).train.images
    assert images.shape == (1, 4, 4, 1)
    assert images.flatten().tolist() == list(range(0, 256, 16))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_images_of_32_bits_are_rejected(tmp_path, dtype):
    error = refusal(loaded, tmp_path, np.ones((4, 4), dtype), suffix="tiff")
    assert "32 bits" in str(error)


@pytest.mark.parametrize("exif", [ROTATED, b"Exif\0\0damaged"])
def test_photographs_are_rotated_by_their_exif_orientation(tmp_path, exif):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    for part in ("train", "test"):
        path = tmp_path / "images" / part / "ant" / "0.png"
        path.parent.mkdir(parents=True)
        Image.fromarray(pixels).save(path, exif=exif)
    seen = np.rot90(pixels, -1) if exif is ROTATED else pixels
    images = load(tmp_path / "images", tmp_path).train.images
    np.testing.assert_array_equal(images[0], seen)
    np.testing.assert_array_equal(read_image(path, 3, seen.shape[1::-1]), seen)


def test_leading_grey_image_does_not_remove_colours(tmp_path):
    dataset = loaded(tmp_path, GREY, RED, RED)
    expected = [np.full((4, 4, 3), 90), RED, RED]
    np.testing.assert_array_equal(dataset.train.images, expected)
    assert dataset.notes == ()


def test_grey_images_with_transparency_stay_grey(tmp_path):
    clear = np.dstack([GREY, np.full((4, 4), 7, np.uint8)])
    images = loaded(tmp_path, clear).train.images
    np.testing.assert_array_equal(images, GREY[None, ..., None])
