"""SQuARM-SGD's Figures 3.2 and 3.3: ResNet-20 on CIFAR-10, 8 nodes on a ring."""

import argparse
from pathlib import Path

import gossip
from common import markdown, write
from flwr.common.config import parse_config_args

NODES, TRAIN = 8, 50_000


def main() -> None:
    """Run what has not run yet and write ``results/gossip_cifar``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", help="names of runs; all by default")
    parser.add_argument("--data-dir", required=True, help="CIFAR-10 as image folder")
    parser.add_argument("--epochs", type=float, default=400)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=0, help="0: as they are")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--gamma", type=float, default=0.3, help="SQuARM")
    parser.add_argument("--gamma-top-k", type=float, default=0.3)
    parser.add_argument("--gamma-sign", type=float, default=0.5)
    parser.add_argument("--keep", type=float, default=0.01, help="of each tensor")
    parser.add_argument("--warm-up", type=float, help="epochs; 5 of 400 by default")
    parser.add_argument("--trigger", default="", help="the paper's by default")
    parser.add_argument("--run-config", default="", help="further settings")
    parser.add_argument("--looks", type=int, default=40, help="evaluations of a run")
    parser.add_argument("--target", type=float, default=0.1, help="test error")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("results/gossip_cifar"))
    arguments = parser.parse_args()
    gossip.quiet()
    epoch = TRAIN / NODES / arguments.batch_size
    iterations = round(arguments.epochs * epoch)

    def at(fraction: float) -> int:
        """Return the iteration at a fraction of the paper's 400 epochs."""
        return round(fraction * iterations)

    warm_up = at(5 / 400)
    if arguments.warm_up is not None:
        warm_up = round(arguments.warm_up * epoch)
    shared = {
        "task": "image-folder",
        "model": "resnet20",
        "data-dir": arguments.data_dir,
        "image-size": arguments.image_size,
        "num-clients": NODES,
        "partition": "iid",
        "test-partition": "all",
        "graph": "ring",
        "batch-size": arguments.batch_size,
        "learning-rate": arguments.learning_rate,
        # Divided by 5 at 200 and 300 of 400 epochs.
        "learning-rate-schedule": f"steps:{warm_up}:{at(1 / 2)},{at(3 / 4)}:5",
        "momentum": 0.9,
        "weight-decay": 1e-4,
        "per-tensor": True,
        "compressor-k": arguments.keep,
        "seed": arguments.seed,
        **parse_config_args([arguments.run_config]),
    }
    choco = {"algorithm": "choco-sgd"}
    squarm = {
        "algorithm": "squarm-sgd",
        "compressor": "sign-top-k",
        "local-steps": 5,
        "consensus-step": arguments.gamma,
    }
    # 2.5, raised by 1.5 every 20 of 400 epochs until epoch 350.
    trigger = arguments.trigger or f"2.5:1.5:{max(1, at(20 / 400))}:{at(350 / 400)}"
    settings = {
        "D-PSGD": {"algorithm": "dpsgd"},
        "CHOCO (Sign)": choco
        | {"compressor": "sign", "consensus-step": arguments.gamma_sign},
        "CHOCO (TopK)": choco
        | {"compressor": "top-k", "consensus-step": arguments.gamma_top_k},
        "SQuARM, no trigger": squarm,
        "SQuARM": squarm | {"trigger": trigger},
    }
    runs = {}
    for name in arguments.runs or settings:
        own = shared | settings[name]
        own["num-server-rounds"] = iterations // int(own.get("local-steps", 1))
        every = max(1, int(own["num-server-rounds"]) // arguments.looks)
        runs[name] = gossip.run(name, own, arguments.output, every)
    if len(runs) < len(settings):
        return
    size = f"{arguments.image_size} x {arguments.image_size}"
    further = f", {arguments.run_config}" if arguments.run_config else ""
    body = (
        f"CIFAR-10{f' at {size}' if arguments.image_size else ''}, spread evenly over "
        f"8 nodes on a ring, ResNet-20 (269,722 parameters), {arguments.epochs:g} "
        f"epochs of batch {arguments.batch_size}, i.e. {iterations} iterations; the "
        "paper's schedules (400 epochs) are scaled to that. Learning rate "
        f"{arguments.learning_rate} after a warm-up of {warm_up} iterations, momentum "
        f"0.9, {arguments.keep:.0%} of each tensor, H = 5, trigger `{trigger}`"
        f"{further}. Consensus steps: Sign "
        f"{arguments.gamma_sign}, TopK {arguments.gamma_top_k}, SQuARM "
        f"{arguments.gamma}. Seed {arguments.seed}. Errors are those of the mean of "
        "the nodes' models (and batch statistics); the target is "
        f"{arguments.target}."
        "\n\n"
        + markdown(gossip.HEADER, gossip.table(runs, arguments.target, "SQuARM"))
        + "\n![test error](gossip_cifar.png)\n"
    )
    write("gossip_cifar", "SQuARM-SGD, ResNet-20 on CIFAR-10", body, runs)
    gossip.plot(runs, arguments.target, "gossip_cifar.png")


if __name__ == "__main__":
    main()
