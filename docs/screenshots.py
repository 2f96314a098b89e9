"""Take the screenshots of the report page: ``python -m docs.screenshots``.

They show real runs, with three clients and with a thousand, in a headless Chromium,
which Debian's package ``chromium`` installs.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from flwr_frl import simulate
from flwr_frl.results.page.document import write_page

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "e2e"))


def enough_digits(folder: Path, count: int) -> None:
    """Write ``count`` training and half as many test images, digits with noise."""
    digits = load_digits()
    rng = np.random.default_rng(0)
    for part, number in (("train", count), ("test", count // 2)):
        chosen = rng.integers(len(digits.images), size=number)
        noise = rng.normal(0, 24, (number, 8, 8))
        images = np.clip(digits.images[chosen] * 16 + noise, 0, 255).astype(np.uint8)
        labels = digits.target[chosen]
        np.savez(folder / f"{part}.npz", images=images[..., None], labels=labels)


def main() -> None:
    """Make the runs, and take the screenshots."""
    from browser import browser

    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        three, thousand = home / "three-devices", home / "a-thousand-clients"
        common = {"backend": "inline", "evaluate_every": 1, "head_epochs": 1}
        simulate(
            "fedrep",
            clients=3,
            rounds=15,
            output=str(three),
            partition="dirichlet",
            fraction=1.0,
            **common,
        )
        simulate(
            "fedavg",
            clients=3,
            rounds=15,
            output=str(three),
            partition="dirichlet",
            fraction=1.0,
            **common,
        )
        enough_digits(home, 20_000)
        for algorithm in ("fedavg", "scaffold"):
            simulate(
                algorithm,
                clients=1000,
                rounds=15,
                fraction=0.1,
                task="arrays",
                data_dir=str(home),
                model="logistic",
                output=str(thousand),
                learning_rate=0.1,
                **common,
            )
        with browser(home / "profile") as page:
            for folder, name, width, height, dark in (
                (three, "page-devices", 1200, 1180, False),
                (thousand, "page-clients", 1200, 1900, False),
                (thousand, "page-telephone", 390, 1700, True),
            ):
                write_page(folder)
                page.screen(width, height, dark)
                page.open((folder / "report.html").as_uri())
                page.shoot(HERE / f"{name}.png")


if __name__ == "__main__":
    main()
