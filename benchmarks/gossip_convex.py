"""SQuARM-SGD's Figure 3.4: logistic regression on MNIST digits, 60 nodes on a ring.

``--data-dir`` is torchvision's root with the official MNIST test set in ``MNIST/raw``
(10,000 digits, unpacked idx files); 8,000 of them are for training here.
"""

import argparse
from pathlib import Path

import gossip
import numpy as np
from common import markdown, write
from PIL import Image

SHARED = {
    "task": "image-folder",
    "model": "logistic",
    "num-clients": 60,
    "partition": "dirichlet",
    "test-partition": "all",
    "augment": False,
    "graph": "ring",
    "batch-size": 5,
    "momentum": 0.0,
    "weight-decay": 0.0,
    "learning-rate-schedule": "inverse:100",
}


def folder(data_dir: Path, output: Path) -> Path:
    """Write the test set as an image folder with 8,000 and 2,000 digits.

    Parameters
    ----------
    data_dir : Path
        torchvision's root.
    output : Path
        Where the folder is made, once.

    Returns
    -------
    Path
        The folder.
    """
    made = output / "digits"
    if made.is_dir():
        return made
    raw = data_dir / "MNIST" / "raw"
    images = np.fromfile(raw / "t10k-images-idx3-ubyte", np.uint8)[16:]
    labels = np.fromfile(raw / "t10k-labels-idx1-ubyte", np.uint8)[8:]
    order = np.random.default_rng(0).permutation(len(labels))
    for place, i in enumerate(order):
        part = "train" if place < 8000 else "test"
        path = made / part / str(labels[i]) / f"{i:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.reshape(-1, 28, 28)[i]).save(path)
    return made


def main() -> None:
    """Run what has not run yet and write ``results/gossip_convex``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", help="names of runs; all by default")
    parser.add_argument("--data-dir", required=True, type=Path)
    parser.add_argument("--iterations", type=int, default=4000)
    parser.add_argument("--every", type=int, default=50, help="iterations a look")
    parser.add_argument("--alpha", type=float, default=1.0, help="of Dirichlet")
    parser.add_argument("--step", type=float, default=1.0, help="a of a / (t + 100)")
    parser.add_argument("--target", type=float, default=0.12)
    parser.add_argument("--trigger", default="5000:1000:1000")
    parser.add_argument("--gamma-sign", type=float, default=0.3)
    parser.add_argument("--gamma-topk", type=float, default=0.02)
    parser.add_argument("--gamma-squarm", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("results/gossip_convex"))
    arguments = parser.parse_args()
    gossip.quiet()
    shared = SHARED | {
        "data-dir": str(folder(arguments.data_dir, arguments.output)),
        "dirichlet-alpha": arguments.alpha,
        "learning-rate": arguments.step,
        "seed": arguments.seed,
    }
    choco = {"algorithm": "choco-sgd", "compressor-k": 10.0}
    squarm = {
        "algorithm": "squarm-sgd",
        "compressor": "sign-top-k",
        "compressor-k": 10.0,
        "local-steps": 5,
        "consensus-step": arguments.gamma_squarm,
    }
    settings = {
        "D-PSGD": {"algorithm": "dpsgd"},
        "CHOCO (Sign)": choco
        | {"compressor": "sign", "consensus-step": arguments.gamma_sign},
        "CHOCO (TopK)": choco
        | {"compressor": "top-k", "consensus-step": arguments.gamma_topk},
        "SQuARM, no trigger": squarm,
        "SQuARM": squarm | {"trigger": arguments.trigger},
    }
    runs = {}
    for name in arguments.runs or settings:
        own = shared | settings[name]
        local = int(own.get("local-steps", 1))
        own["num-server-rounds"] = arguments.iterations // local
        every = max(1, arguments.every // local)
        runs[name] = gossip.run(name, own, arguments.output, every)
    if len(runs) < len(settings):
        return
    body = (
        "10,000 MNIST digits, 8,000 for training, 2,000 for the test; 60 nodes on a "
        f"ring, classes by Dirichlet({arguments.alpha:g}); 7,850 parameters, batch 5, "
        f" step {arguments.step:g} / (t + 100), seed {arguments.seed}. TopK and "
        "SignTopK keep 10 entries; SQuARM has H = 5 and the trigger "
        f"`{arguments.trigger}`. Consensus steps: Sign {arguments.gamma_sign}, TopK "
        f"{arguments.gamma_topk}, SQuARM {arguments.gamma_squarm}. Errors are those of "
        f"the mean of the nodes' models; the target is {arguments.target}.\n\n"
        + markdown(gossip.HEADER, gossip.table(runs, arguments.target, "SQuARM"))
        + f"\nA SQuARM node sends at most {arguments.iterations // 5} messages of 10 "
        "entries, for 7,850 parameters.\n" + "\n![test error](gossip_convex.png)\n"
    )
    write("gossip_convex", "SQuARM-SGD, logistic regression", body, runs)
    gossip.plot(runs, arguments.target, "gossip_convex.png")


if __name__ == "__main__":
    main()
