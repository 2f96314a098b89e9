"""Slow links: bytes that a client receives and sends in a round, and float16.

Sizes are those of real messages in a settled round. They depend on the model and not on
the images, so random images are used. With ``--data-dir``, the accuracy that float16
costs is measured as well.
"""

import argparse
import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message, MessageType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from benchmarks.common import RESULTS, markdown, write
from benchmarks.runs import Job, carry_out, finished
from flwr_frl.clients.algorithms import complete
from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import Setting, SettingsError, resolve
from flwr_frl.strategies import ALGORITHMS, build_strategy
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.rounds import run_rounds

TRANSPORTS = ("float32", "float16")
ACCURACY: dict[str, dict[str, Setting]] = {
    "fedrep": {"head-epochs": 1},
    "flute": {},
    "fedavg": {},
}
NODES = 4
# The measured round. The first exchange of multi-task is not compressed, and the
# neighbours receive it in round 2.
SETTLED = 3
IMAGES: dict[str, Setting] = {
    "task": "arrays",
    "model": "cifar10-cnn",
    "partition": "iid",
    "head-epochs": 1,
    "consensus-step": 0.2,
}
COMPRESSORS = ("identity", "sign", "top-k", "sign-top-k")
COMPRESSED = [
    (f", {name}", IMAGES | {"compressor": name, "compressor-k": 0.01}, SETTLED)
    for name in COMPRESSORS
]
ON_IMAGES = [("", IMAGES, SETTLED)]
LINEAR = (" (linear)", {"task": "linear"}, SETTLED)
# Suffix of the algorithm's name, settings, and the measured round
Row = tuple[str, dict[str, Setting], int]
ROWS: dict[str, list[Row]] = {
    "choco-sgd": COMPRESSED,
    "squarm-sgd": COMPRESSED,
    # FedBN keeps batch norms on the clients, so its model must have some.
    "fedbn": [(" (ResNet-20)", IMAGES | {"model": "resnet20"}, SETTLED)],
    "fedrep": [*ON_IMAGES, LINEAR],
    "flute": [*ON_IMAGES, LINEAR],
    "multi-task": [
        (f" ({task}), {name}", {"task": task, "compressor": name}, SETTLED)
        for task in ("qcqp", "multi-task-logistic")
        for name in ("identity", "sign-top-k")
    ],
    "representation-transfer": [
        (f"{kind}, {role}", {**settings, "num-sources": NODES // 2}, server_round)
        for kind, settings in (("", IMAGES), (" (transfer)", {"task": "transfer"}))
        for server_round, role in ((1, "source"), (2, "target"))
    ],
}


class RecordingGrid(InlineGrid):
    """Keeps the training messages of one round and their replies."""

    server_round = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return replies; keep messages and replies if they belong to the round.

        Parameters
        ----------
        message_ids : iterable of str
            As in `InlineGrid`.

        Returns
        -------
        list of Message
            The replies.
        """
        ids = list(message_ids)
        sent = [self._pending[i] for i in ids]
        replies = list(super().pull_messages(ids))
        metadata = sent[0].metadata if sent else None
        if (
            metadata is not None
            and metadata.message_type == MessageType.TRAIN
            and metadata.group_id == str(self.server_round)
        ):
            self.kept = sent, replies
        return replies


def size(messages: list[Message]) -> tuple[int, int]:
    """Return the size of the largest message.

    Parameters
    ----------
    messages : list of Message
        Messages to or from the clients, of nearly the same size.

    Returns
    -------
    values : int
        Bytes of the arrays' values, or of the vectors that gossip compresses.
    overhead : int
        Bytes of the rest as serialised by Flower: names, headers, settings, metrics.
    """
    sizes = []
    for message in messages:
        objects = get_all_nested_objects(message).values()
        total = sum(len(o.deflate()) for o in objects)
        values = sum(
            int(np.prod(array.shape)) * np.dtype(array.dtype).itemsize
            for record in message.content.array_records.values()
            for array in record.values()
        )
        for record in message.content.config_records.values():
            vectors = [record.get("message", b""), *record.get("relayed-data", [])]
            values += sum(map(len, vectors))
        sizes.append((values, total - values))
    return max(sizes)


def measure(
    algorithm: str, given: dict[str, Setting], server_round: int
) -> dict[str, tuple[int, int]]:
    """Return the sizes of what a client receives and sends in a round.

    Parameters
    ----------
    algorithm : str
        Name of the algorithm.
    given : dict
        Settings that differ from the defaults.
    server_round : int
        The measured round.

    Returns
    -------
    dict of str to (int, int)
        ``down`` and ``up``: values and overhead.
    """
    settings = complete(
        resolve(
            {
                "algorithm": algorithm,
                "num-clients": NODES,
                "fraction-train": 1.0,
                "initial-nodes": NODES,
                **given,
            }
        )
    )
    grid = RecordingGrid(make_app(dict(settings)), NODES)
    grid.server_round = server_round
    strategy = build_strategy(settings)
    arrays = strategy.initialize(grid)
    rounds = range(1, server_round + 1)
    run_rounds(strategy, grid, arrays, rounds, evaluated=lambda _: False)
    if strategy.round.rejections:
        raise RuntimeError(f"{algorithm}: {strategy.round.rejections}")
    return {way: size(m) for way, m in zip(("down", "up"), grid.kept, strict=True)}


def write_images(folder: Path) -> None:
    """Write random images as ``train.npz`` and ``test.npz``.

    Parameters
    ----------
    folder : Path
        Folder of the files.
    """
    rng = np.random.default_rng(0)
    for name in ("train", "test"):
        images = rng.integers(0, 256, (10 * NODES, 32, 32, 3), np.uint8)
        labels = np.arange(10 * NODES) % 10
        np.savez(folder / f"{name}.npz", images=images, labels=labels)


def measure_all() -> dict[str, dict[str, dict[str, tuple[int, int]]]]:
    """Measure all algorithms with both transports.

    Returns
    -------
    dict
        Sizes by row and transport; float16 is missing if an algorithm refuses it.
    """
    data: dict[str, dict[str, dict[str, tuple[int, int]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        for algorithm in ALGORITHMS:
            for about, settings, server_round in ROWS.get(algorithm, ON_IMAGES):
                row = data.setdefault(algorithm + about, {})
                for transport in TRANSPORTS:
                    own = {"data-dir": folder, "cache-dir": folder}
                    own |= {**settings, "transport": transport}
                    try:
                        row[transport] = measure(algorithm, own, server_round)
                    except SettingsError:
                        if transport == "float32":
                            raise
    return data


def bytes_table(data: dict[str, dict[str, dict[str, tuple[int, int]]]]) -> str:
    """Return the table of sizes."""
    rows = []
    for name, by_transport in data.items():
        usual = by_transport["float32"]
        cells = [f"{n:,}" for way in ("down", "up") for n in usual[way]]
        short = by_transport.get("float16")
        if short is None:
            rows.append((f"`{name}`", *cells, "no", "no"))
            continue
        for way in ("down", "up"):
            saves = short[way][0] < usual[way][0]
            cells.append(f"{short[way][0]:,}" if saves else "=")
        rows.append((f"`{name}`", *cells))
    columns = ("algorithm", "receives", "overhead", "sends", "overhead")
    return markdown((*columns, "float16: receives", "sends"), rows)


def plot_bytes(data: dict[str, dict[str, dict[str, tuple[int, int]]]]) -> None:
    """Plot the bytes of a round, in both directions and with all overhead."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.22 * len(data) + 1), layout="constrained")
    axes = figure.subplots()
    totals = {
        transport: [
            sum(sum(way) for way in row.get(transport, row["float32"]).values())
            for row in data.values()
        ]
        for transport in TRANSPORTS
    }
    # Drawn over the first bars, of which the part that float16 saves stays visible
    saved = [b if b < a else 0 for a, b in zip(*totals.values(), strict=True)]
    axes.barh(list(data), totals["float32"], label="float32")
    axes.barh(list(data), saved, label="transport=float16")
    axes.set(xscale="log", xlabel="bytes that a client receives and sends in a round")
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper right", ncols=2)
    figure.savefig(RESULTS / "slow_links.png", dpi=150)


def accuracies(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Carry out the missing runs; return the table of accuracies and the runs."""
    rows, data = [], {}
    for algorithm, own in ACCURACY.items():
        runs = []
        for transport in TRANSPORTS:
            settings: dict[str, Setting] = {
                "task": "image-folder",
                "data-dir": str(Path(arguments.data_dir).absolute()),
                "num-clients": arguments.clients,
                "classes-per-client": arguments.classes_per_client,
                "fraction-train": 0.1,
                "num-server-rounds": arguments.rounds,
                "evaluate-every": 0,
                "evaluate-last": 5,
                "bfloat16": True,
                "transport": transport,
                "seed": arguments.seed,
                **own,
            }
            place = Path(arguments.output).absolute() / f"{algorithm}-{transport}"
            job = Job(place, algorithm, settings)
            runs.append(finished(job) or carry_out(job))
            data[f"{algorithm}-{transport}"] = runs[-1]
        full, short = (100 * found["accuracy"] for found in runs)
        figures = (f"{full:.2f}", f"{short:.2f}", f"{short - full:+.2f}")
        label = " ".join([algorithm, *(f"{n}={v}" for n, v in own.items())])
        commits = ", ".join(sorted({found["commit"] for found in runs}))
        rows.append((f"`{label}`", *figures, commits))
    columns = ("algorithm", *TRANSPORTS, "difference", "commit")
    return markdown(columns, rows), data


def main() -> None:
    """Measure and write ``results/slow_links``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default="", help="CIFAR-10 as image folder")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--classes-per-client", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="results/slow_links")
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    data: dict[str, Any] = {"bytes": measure_all()}
    body = (
        "Bytes that one client receives and sends when it trains in a round (round "
        f"{SETTLED} of {NODES} clients, all sampled). `receives` and `sends` are the "
        "values of the arrays. The overhead is the rest of the message as Flower "
        "serialises it, such as names, array headers and settings. HTTP and TLS add "
        "to this. In an evaluation the client receives the same amount again and "
        "sends back a few numbers.\n\nUnless stated otherwise, the model is FedRep's "
        "CNN for CIFAR-10 (307,842 parameters). Gossip uses a ring, so a node "
        "receives the vectors of two neighbours; TopK keeps 1 %. "
        "`representation-transfer` communicates once, not in every round; there are "
        f"{NODES // 2} sources. The names in parentheses are tasks other than the "
        "default, with their default dimensions. float16 applies to float32 arrays "
        "that are averaged: `=` means no effect, and `no` that it is refused.\n\n"
        + bytes_table(data["bytes"])
        + "\n![bytes in a round](slow_links.png)\n"
    )
    if arguments.data_dir:
        table, data["accuracy"] = accuracies(arguments)
        body += (
            '\nAccuracy with `transport="float16"` on CIFAR-10: '
            f"{arguments.clients} clients, {arguments.classes_per_client} shards each, "
            f"10 % a round, {arguments.rounds} rounds, bfloat16 training, seed "
            f"{arguments.seed}; accuracy in %, mean over clients and the last 5 "
            "rounds.\n\n" + table
        )
    write("slow_links", "Slow links: bytes in a round, and float16", body, data)
    plot_bytes(data["bytes"])


if __name__ == "__main__":
    main()
