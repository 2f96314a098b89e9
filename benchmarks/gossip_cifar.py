"""SQuARM-SGD's Figures 3.2 and 3.3: ResNet-20 on CIFAR-10, 8 nodes on a ring."""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from flwr.common.config import parse_config_args

from benchmarks import gossip_page
from benchmarks.gossip import SENT, Bench, methods, quiet
from flwr_frl.common.settings import Setting, Settings

NODES, TRAIN = 8, 50_000
VALIDATION = 0.1
# Learning rates, and the consensus step as multiples of `auto`'s.
RATES = (0.0125, 0.025, 0.05, 0.1)
STEPS = (0.5, 2.0, 6.0)


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="CIFAR-10 as image folder")
    parser.add_argument("--epochs", type=float, default=400)
    parser.add_argument("--search-epochs", type=float, default=40)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=0, help="0: unchanged")
    parser.add_argument("--keep", type=float, default=0.01, help="share of each tensor")
    parser.add_argument("--warm-up", type=float, default=5 / 400, help="share of run")
    parser.add_argument("--triggers", nargs="*", help="default: the paper's")
    parser.add_argument("--run-config", default="", help="further settings")
    parser.add_argument("--looks", type=int, default=40, help="evaluations of a run")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs")
    parser.add_argument("--output", type=Path, default=Path("results/gossip_cifar"))
    return parser.parse_args()


def shared(arguments: argparse.Namespace, total: int) -> dict[str, Setting]:
    """Return a run's settings, with the paper's schedule scaled to its length."""
    warm_up = round(arguments.warm_up * total)
    # In the paper, the rate is divided at 200 and 300 of 400 epochs.
    divided = f"{total // 2},{total * 3 // 4}"
    return {
        "task": "image-folder",
        "model": "resnet20",
        "data-dir": arguments.data_dir,
        "image-size": arguments.image_size,
        "num-clients": NODES,
        "partition": "iid",
        "test-partition": "all",
        "validation-fraction": VALIDATION,
        "graph": "ring",
        "batch-size": arguments.batch_size,
        "learning-rate-schedule": f"steps:{warm_up}:{divided}:5",
        "momentum": 0.9,
        "weight-decay": 1e-4,
        "per-tensor": True,
        **parse_config_args([arguments.run_config]),
    }


def main() -> None:
    """Carry out the missing runs and write ``results/gossip_cifar``."""
    arguments = parse()
    quiet()
    # Iterations per epoch of a node, which keeps a share of its examples for validation
    epoch = TRAIN / NODES * (1 - VALIDATION) / arguments.batch_size
    iterations = round(arguments.epochs * epoch)

    # The paper's threshold starts at 2.5 and increases by 1.5 every 20 of 400 epochs
    # until epoch 350.
    steps = max(1, iterations // 20), iterations * 7 // 8
    triggers = arguments.triggers or ["2.5:1.5:{}:{}".format(*steps)]
    rows = methods(arguments.keep, STEPS, triggers)
    size = arguments.image_size
    more = f", {arguments.run_config}" if arguments.run_config else ""

    def about(picked: Mapping[str, Settings]) -> str:
        return (
            f"CIFAR-10{f' at {size} x {size}' if size else ''}, divided evenly over "
            "8 nodes on a ring; a tenth of each node's examples is used for "
            f"validation. ResNet-20 (269,722 parameters), {arguments.epochs:g} "
            f"epochs with batch size {arguments.batch_size}, i.e. {iterations} "
            "iterations. The paper's schedules (400 epochs) are scaled to this "
            f"length, with a warm-up of {arguments.warm_up:.3g} of it. Momentum 0.9, "
            f"{arguments.keep:.0%} of each tensor, H = 5{more}. With a trigger, "
            "SQuARM uses the learning rate and the consensus step that were chosen "
            "without one. With a trigger, a node sends if its squared distance from "
            "its neighbours' copy exceeds c times the squared step size. c is START, "
            "or START:INCREMENT:EVERY:UNTIL in iterations; all of these are o(t)."
        )

    searching = round(arguments.search_epochs * epoch)
    gossip_page.make(
        "gossip_cifar",
        "SQuARM-SGD, ResNet-20 on CIFAR-10",
        about,
        Bench(
            *(arguments.output, partial(shared, arguments), iterations, searching),
            looks=arguments.looks,
            own=arguments.looks,
        ),
        rows,
        RATES,
        SENT,
        arguments.seeds,
        arguments.jobs,
    )


if __name__ == "__main__":
    main()
