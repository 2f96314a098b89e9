"""Batches of examples, and random crops compared with all possible crops."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import code_of

from flwr_frl.task import examples
from flwr_frl.task.examples import ExampleSet, cropped, crops


def numbered(n: int) -> ExampleSet:
    """Return vectors whose first entry and target are their index."""
    values = torch.arange(n)
    return ExampleSet(torch.stack([values, values * 2], 1).float(), values)


@pytest.mark.parametrize("chunk", [8, examples.CHUNK])
@given(st.integers(0, 70), st.integers(1, 80), st.booleans())
def test_batches_cover_everything_once(chunk, n, batch_size, shuffle):
    # No batch may end early at a chunk border.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examples, "CHUNK", chunk)
        batches = list(numbered(n).batches(batch_size, shuffle))
    full, rest = divmod(n, batch_size)
    sizes = [len(targets) for _, targets in batches]
    assert sizes == [batch_size] * full + [rest] * (rest > 0)
    seen = [int(t) for _, targets in batches for t in targets]
    assert sorted(seen) == list(range(n))
    if not shuffle:
        assert seen == sorted(seen)
    for inputs, targets in batches:
        assert torch.equal(inputs[:, 0], targets.float())


def test_shuffling_and_draws_follow_torch_and_differ_between_epochs():
    def drawn() -> list:
        torch.manual_seed(3)
        batches = (numbered(50).batches(10, shuffle=True) for _ in range(2))
        return [*([t.tolist() for _, t in each] for each in batches), *draws()]

    def draws() -> list:
        return [numbered(50).draw(5)[1].tolist() for _ in range(2)]

    first = drawn()
    assert first == drawn()
    assert first[0] != first[1]
    assert first[2] != first[3]


def crops_of(image: np.ndarray, padding: int) -> list[np.ndarray]:
    """Return every crop of the zero-padded image, and its mirror image."""
    height, width, _ = image.shape
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    crops = [
        padded[top : top + height, left : left + width]
        for top in range(2 * padding + 1)
        for left in range(2 * padding + 1)
    ]
    return crops + [crop[:, ::-1] for crop in crops]


def test_all_offsets_and_both_directions_occur_equally_often():
    # Distinct nonzero pixels show where a crop was taken.
    image = np.arange(1, 91, dtype=np.uint8).reshape(9, 10, 1)
    n = 162 * 40
    torch.manual_seed(1)
    images = torch.from_numpy(image).expand(n, -1, -1, -1)
    results = cropped(images, *crops(n)).numpy().reshape(n, -1)
    place = {crop.tobytes(): i for i, crop in enumerate(crops_of(image, 4))}
    assert len(place) == 2 * 9 * 9
    counts = np.bincount([place[crop.tobytes()] for crop in results], minlength=162)
    # Chi-squared with 161 degrees of freedom: mean 161, standard deviation 18.
    chi_squared = ((counts - 40) ** 2 / 40).sum()
    assert abs(chi_squared - 161) < 5 * np.sqrt(2 * 161)


def augmented(n: int = 40) -> ExampleSet:
    images = torch.randint(0, 256, (n, 8, 8, 3), dtype=torch.uint8)
    zero, one = torch.zeros(3), torch.ones(3)
    return ExampleSet(images, torch.arange(n), zero, one, augment=True)


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 8, 8), (2, 5)])
def test_augment_requires_images_with_channels_last(shape):
    call = (ExampleSet, torch.zeros(shape), torch.zeros(2))
    assert code_of(*call, augment=True) == "augment"
    # Without augmentation, any shape is allowed.
    ExampleSet(torch.zeros(shape), torch.zeros(2))


def test_augmentation_keeps_image_and_target_together():
    data, changed = augmented(), 0
    plain = data.inputs.permute(0, 3, 1, 2).float()
    for inputs, targets in (*data.batches(6, shuffle=True), data.draw(40)):
        for image, target in zip(inputs, targets, strict=True):
            crops = crops_of(data.inputs[int(target)].numpy(), 4)
            pixels = image.permute(1, 2, 0).numpy()
            assert any(np.array_equal(pixels, crop) for crop in crops)
            changed += not torch.equal(image, plain[target])
    assert changed > 60


def test_only_shuffled_batches_are_augmented():
    data = augmented()
    plain = data.inputs.permute(0, 3, 1, 2).float()
    without = data.without_augmentation()
    unchanged = [*data.batches(7), *without.batches(7, shuffle=True), without.draw(40)]
    for inputs, targets in unchanged:
        assert torch.equal(inputs, plain[targets])
    assert data.augment


def test_sample_draws_a_share_without_replacement():
    data = numbered(20)
    for some in (data, data.sample(0.8), data.sample(0.8).sample(0.5)):
        pairs = some.batches(7)
        seen = [pair for x, y in pairs for pair in zip(x[:, 0], y, strict=True)]
        assert all(first == second for first, second in seen)
        assert len({int(y) for _, y in seen}) == len(seen) == len(some)
    sizes = [len(data.sample(share)) for share in (1, 0.8, 0.5, 0.001)]
    assert sizes == [20, 16, 10, 1]


# Single batches


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_integer_targets_are_int64(dtype):
    # PyTorch would use uint8 targets as a mask when indexing.
    examples = ExampleSet(torch.ones(3, 2), torch.tensor([0, 2, 1], dtype=dtype))
    assert examples.targets.dtype == torch.int64
    assert examples.targets.tolist() == [0, 2, 1]
