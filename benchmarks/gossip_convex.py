"""SQuARM-SGD's Figure 3.4: logistic regression on MNIST digits, 60 nodes on a ring.

``--data-dir`` is torchvision's root with MNIST's unpacked idx files in ``MNIST/raw``.
If the training digits are present, all 70,000 digits are used, 60,000 of them for
training. Otherwise, only the 10,000 digits of the test set are used, 8,000 of them for
training.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks import gossip_page
from benchmarks.gossip import SENT, Bench, methods, quiet
from flwr_frl.common.settings import Setting, Settings

SHARED: dict[str, Setting] = {
    "task": "image-folder",
    "model": "logistic",
    "num-clients": 60,
    "partition": "dirichlet",
    "test-partition": "all",
    "validation-fraction": 0.125,
    "augment": False,
    "graph": "ring",
    "batch-size": 5,
    "momentum": 0.0,
    "weight-decay": 0.0,
    "learning-rate-schedule": "inverse:100",
}
# Values of a in the step size a / (t + 100), and γ as multiples of that of `auto`
RATES = (1.0, 3.0, 10.0)
STEPS = (2.0, 8.0)
# Two constant thresholds, and one that increases during the first half of the run
TRIGGERS = ("1e4", "1e5", "1e4:3e4:200:1000")

Images = NDArray[np.uint8]


def digits(raw: Path, part: str) -> tuple[Images, Images]:
    """Return the images and labels of ``train`` or ``t10k``."""
    images = np.fromfile(raw / f"{part}-images-idx3-ubyte", np.uint8)[16:]
    labels = np.fromfile(raw / f"{part}-labels-idx1-ubyte", np.uint8)[8:]
    return images.reshape(-1, 28, 28), labels


def folder(data_dir: Path, output: Path) -> tuple[Path, int, int]:
    """Write MNIST as an image folder, unless it exists.

    Parameters
    ----------
    data_dir : Path
        torchvision's root.
    output : Path
        Parent of the image folder.

    Returns
    -------
    path : Path
        The image folder.
    train, test : int
        Numbers of training and test digits.
    """
    raw = data_dir / "MNIST" / "raw"
    images, labels = digits(raw, "t10k")
    if (raw / "train-images-idx3-ubyte").is_file():
        test = np.arange(len(labels))
        more, theirs = digits(raw, "train")
        train = np.arange(len(theirs)) + len(labels)
        images, labels = np.concatenate([images, more]), np.append(labels, theirs)
    else:
        order = np.random.default_rng(0).permutation(len(labels))
        train, test = np.split(order, [8000])
    place = output / f"digits-{len(train)}"
    if not place.is_dir():
        for part, chosen in (("train", train), ("test", test)):
            for i in chosen:
                path = place / part / str(labels[i]) / f"{i:05d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(images[i]).save(path)
    return place, len(train), len(test)


def shared(own: Settings, total: int) -> dict[str, Setting]:
    """Return a run's settings, which do not depend on its length."""
    return SHARED | own


def main() -> None:
    """Carry out the missing runs and write ``results/gossip_convex``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, type=Path)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--alpha", type=float, default=1.0, help="Dirichlet alpha")
    parser.add_argument("--keep", type=float, default=10.0, help="of 7,850 entries")
    parser.add_argument("--triggers", nargs="*", default=TRIGGERS, help="for SQuARM")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs")
    parser.add_argument("--output", type=Path, default=Path("results/gossip_convex"))
    arguments = parser.parse_args()
    quiet()
    made, train, test = folder(arguments.data_dir, arguments.output)
    own = {"data-dir": str(made), "dirichlet-alpha": arguments.alpha}
    times = arguments.iterations
    rows = methods(arguments.keep, STEPS, arguments.triggers)

    def about(picked: Mapping[str, Settings]) -> str:
        own = picked[SENT]
        return (
            f"MNIST: {train:,} training digits, of which an eighth of each node's is "
            f"used for validation, and {test:,} test digits. 60 nodes on a ring, "
            f"classes by Dirichlet({arguments.alpha:g}); 7,850 parameters, batch "
            "size 5, step size a / (t + 100). TopK and SignTopK keep "
            f"{arguments.keep:g} entries; SQuARM has H = 5. With a trigger, SQuARM "
            "uses the a and the consensus step that were chosen without one (a = "
            f"{own['learning-rate']:g}). With a trigger, a node sends if its squared "
            "distance from its neighbours' copy exceeds c times the squared step "
            "size. c is START, or START:INCREMENT:EVERY:UNTIL in iterations; all of "
            "these are o(t)."
        )

    gossip_page.make(
        "gossip_convex",
        "SQuARM-SGD, logistic regression",
        about,
        Bench(arguments.output, partial(shared, own), times, times, looks=40, own=10),
        rows,
        RATES,
        SENT,
        arguments.seeds,
        arguments.jobs,
    )


if __name__ == "__main__":
    main()
