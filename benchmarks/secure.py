"""Measure secure aggregation: its cost, what it hides, and how exact it is.

``python -m benchmarks.secure`` writes ``results/secure.md``. *Cost*: CPU time and bytes
of the protocol alone. *Reconstruction*: images of a client that can be read from what
the server receives, with and without secure aggregation. *Exactness*: the difference
from a plain run, by algorithm. With ``--devices``, it instead writes
``results/secure_devices.md``: seconds per round on the same devices, plain and secure.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.common import markdown, write
from flwr_frl.common.checkpoint import FILE, read
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.secure.fixed_point import Plan
from flwr_frl.common.secure.messages import DIGITS
from flwr_frl.common.secure.protocol import Coordinator, Member
from flwr_frl.common.settings import resolve
from flwr_frl.running import simulate
from flwr_frl.strategies.algorithms import ALGORITHMS
from flwr_frl.task import SGD, train
from flwr_frl.task.tasks import build_task

SENT = b"model"
# Clients, neighbours (0: all), and values of a model.
SIZES = (
    *((10, 0, 10**5), (30, 0, 10**5), (30, 10, 10**5)),
    *((100, 0, 10**5), (100, 20, 10**5), (10, 0, 10**7)),
)
CLIENTS = 10
# A reconstruction counts from this peak signal-to-noise ratio, in dB.
LIKE = 20.0
# Below this change of a neuron's bias, it has not been active.
ACTIVE = 1e-6
# Runs that are compared with plain ones.
EXACT: dict[str, Any] = {
    "backend": "inline",
    "model": "mlp-2",
    "num_clients": 5,
    "fraction_train": 1.0,
    "num_server_rounds": 2,
    "evaluate_every": 0,
    "evaluate_last": 0,
}
# Settings that some algorithms need.
NEEDED: dict[str, dict[str, Any]] = {
    "lg-fedavg": {"model": "mlp"},
    "fedbn": {"model": "resnet20", "batch_size": 150},
    "srpfl": {"initial_nodes": 3},
    **{name: {"adapters": "lora"} for name in ("fedsa-lora", "ffa-lora", "feddpa")},
}
DEVICES = ("000000", "000001", "000002")
ON_DEVICES = (
    'algorithm="fedrep" task="image-folder" model="digits-cnn" num-clients=3 '
    "min-available-nodes=3 fraction-train=1.0 num-server-rounds=6 evaluate-every=0 "
    "evaluate-last=0 head-epochs=1 batch-size=6 augment=false round-timeout=300.0"
)


class Clock:
    """CPU seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Add the time that the context takes."""
        began = time.process_time()
        yield
        spent = time.process_time() - began
        self.seconds[name] = self.seconds.get(name, 0.0) + spent


def cost(n: int, neighbours: int, size: int, dropped: int) -> list[object]:
    """Return a row of the table, of one round with some clients that drop out."""
    clock, server = Clock(), Coordinator(n, 0.67, neighbours)
    about = server.session, server.threshold
    members = {i: Member(i, *about) for i in range(n)}
    words = np.arange(size, dtype=np.uint32)
    with clock.of("keys"):
        keys = {i: member.keys()[i] for i, member in members.items()}
    with clock.of("server"):
        groups = server.take_keys(keys)
    with clock.of("shares"):
        shares = {i: members[i].shares(groups[i]) for i in members}
    with clock.of("server"):
        boxes = server.take_shares(shares)
    for i, member in members.items():
        with clock.of("masked"):
            masked = member.masked(words, boxes[i], SENT)
        if i >= dropped:
            with clock.of("server"):
                server.take_masked(i, masked)
    fates = server.ask_unmask()
    with clock.of("unmask"):
        answers = {i: members[i].unmask(fates[i]) for i in fates}
    with clock.of("server"):
        total = server.take_unmask(answers, SENT)
    assert np.array_equal(total, words * np.uint32(n - dropped))
    up = sum(len(t) + DIGITS for of in (shares[0], answers[n - 1]) for t in of.values())
    down = sum(len(t) + DIGITS for of in (groups[0], boxes[0]) for t in of.values())
    spent = {name: seconds / n for name, seconds in clock.seconds.items()}
    own = (f"{1000 * spent[name]:.3g}" for name in ("shares", "masked"))
    seconds = f"{clock.seconds['server']:.2f}"
    graph = str(neighbours or "all")
    sizes = f"{up + 64:,}", f"{down:,}"
    return [n, graph, f"{size:,}", dropped, *own, seconds, *sizes, f"{4 * size:,}"]


def readable(change: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    """Return for each image the best ratio, in dB, among a layer's neurons.

    The gradient of a neuron's weights is its inputs times that of its bias. So for a
    neuron that was active for a single image, their quotient is this image.
    """
    name = next(n for n in change if n.endswith("weight"))
    weights = change[name].astype(np.float64)
    biases = change[name.replace("weight", "bias")].astype(np.float64)
    seen = weights[np.abs(biases) > ACTIVE] / biases[np.abs(biases) > ACTIVE, None]
    seen = np.clip(seen, images.min(), images.max())
    errors = ((images[:, None] - seen[None]) ** 2).mean(axis=2).min(axis=1)
    peak = images.max() - images.min()
    ratio: np.ndarray = 10 * np.log10(peak**2 / np.maximum(errors, 1e-12))
    return ratio


def reconstruction() -> tuple[list[list[object]], dict[str, Any]]:
    """Return a table of the images that are readable in what the server receives."""
    settings = resolve({"model": "mlp", "num-clients": CLIENTS})
    task, rows, data = build_task(settings, CLIENTS), [], {}
    initial = task.initial_model().state_dict()
    for batch, epochs in ((1, 1), (4, 1), (0, 5)):
        changes, images = [], []
        for i in range(CLIENTS):
            torch.manual_seed(i)
            model = task.initial_model()
            examples = task.train_examples(i)
            if batch:
                examples = examples.subset(torch.arange(batch))
            sgd = SGD(learning_rate=0.01, batch_size=10)
            train(model, "all", examples, task.loss, epochs, sgd)
            after = model.state_dict()
            names = [n for n in initial if n.startswith("representation.")]
            changes.append({n: (after[n] - initial[n]).numpy() for n in names})
            inputs, _ = next(examples.batches(len(examples)))
            images.append(inputs.flatten(1).numpy())
        plan = Plan(3, 32, 8.0, CLIENTS)
        before = {name: np.zeros_like(value) for name, value in changes[0].items()}
        words = [plan.encode(before, change) for change in changes]
        server = Coordinator(CLIENTS, 0.67)
        members = {i: Member(i, server.session, 7) for i in range(CLIENTS)}
        groups = server.take_keys({i: m.keys()[i] for i, m in members.items()})
        boxes = server.take_shares({i: m.shares(groups[i]) for i, m in members.items()})
        masked = [m.masked(words[i], boxes[i], SENT) for i, m in members.items()]
        total = np.add.reduce(words)
        views = {
            "plain": changes[0],
            "masked words": plan.decode(masked[0], before, 1),
            f"mean of {CLIENTS}": plan.decode(total, before, CLIENTS),
        }
        count = len(images[0])
        size = f"{count} image{'s' * (count > 1)}, {epochs} epoch{'s' * (epochs > 1)}"
        row: list[object] = [size]
        for view, change in views.items():
            ratios = readable(change, images[0])
            share, median = float((ratios > LIKE).mean()), float(np.median(ratios))
            row += [f"{share:.0%} ({median:.0f} dB)"]
            data[f"{size}: {view}"] = {"share": share, "median": median}
        rows.append(row)
    return rows, data


def exactness() -> list[list[object]]:
    """Return the largest difference of a shared value from a plain run, by algorithm.

    Algorithms that refuse secure aggregation are left out, and those that only add
    fine-tuning to another one.
    """
    rows: list[list[object]] = []
    for algorithm in (name for name in ALGORITHMS if not name.endswith("-ft")):
        found, needed = [], {**EXACT, **NEEDED.get(algorithm, {})}
        try:
            for more in ({"secure_bits": 32}, {"secure_bits": 64}, {}):
                with tempfile.TemporaryDirectory() as folder:
                    secure = {"secure_aggregation": bool(more), **more}
                    simulate(algorithm, output=folder, **needed, **secure)
                    found.append(read(Path(folder, algorithm, FILE)).arrays)
        except SettingsError as error:
            print(f"{algorithm}: {error}")
            continue
        *secured, plain = found
        differences = [
            max(np.abs(arrays[n] - plain[n]).max(initial=0) for n in plain)
            for arrays in secured
        ]
        rows.append([algorithm, *(f"{value:.1g}" for value in differences)])
    return rows


def seconds_on_devices(home: Path) -> list[list[object]]:
    """Return the median seconds of a round on three SuperNodes, plain and secure."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "e2e"))
    from devices import write_folders
    from federation import Federation, project, read_lines

    write_folders(home / "data", len(DEVICES))
    federation = Federation(home / "home", DEVICES)
    rows: list[list[object]] = []
    try:
        federation.start_superlink()
        federation.register()
        for name in DEVICES:
            folders = f'data-dir="{home / "data" / name}" state-dir="{home / name}"'
            federation.start_supernode(name, f'client-name="{name}" {folders}')
        for secure in ("false", "true"):
            more = f'secure-aggregation={secure} output="{home / secure}"'
            log = federation.run(project(), f"{ON_DEVICES} {more}", 600)
            lines = read_lines(home / secure / "fedrep" / "metrics.jsonl")
            assert all(line["clients"] == len(DEVICES) for line in lines), log
            # Seconds are those since the start. In the first round, devices load torch.
            ends = [float(str(line["seconds"])) for line in lines]
            seconds = [end - start for start, end in pairwise(ends)]
            kind = "secure" if secure == "true" else "plain"
            spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
            rows.append([kind, len(seconds), f"{median(seconds):.1f}", spread])
    finally:
        federation.close()
    return rows


def measure_devices() -> int:
    """Measure rounds on devices, and write the page."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = seconds_on_devices(Path(folder))
    columns = ["run", "rounds", "median seconds of a round", "range"]
    body = (
        f"`fedrep` on {len(DEVICES)} SuperNodes of one machine, connected with TLS, "
        "which first ran plain and then with secure aggregation; without the first "
        f"round of each run. The load of the machine was {load:.1f} when the benchmark "
        f"started and {os.getloadavg()[0]:.1f} when it ended.\n\n"
    )
    title = "Secure aggregation: seconds of a round on devices"
    write("secure_devices", title, body + markdown(columns, rows), {"rows": rows})
    return 0


def main() -> int:
    """Measure, and write a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", action="store_true")
    if parser.parse_args().devices:
        return measure_devices()
    rows = [cost(*size, size[0] // 10) for size in SIZES]
    found, data = reconstruction()
    exact = exactness()
    columns = ["clients", "neighbours", "values", "dropped", "shares, ms", "masked, ms"]
    columns += ["server, s", "bytes up", "bytes down", "bytes of the model"]
    seen = ["trained on", "plain", "masked words", f"mean of {CLIENTS}"]
    body = (
        "## Cost of the protocol\n\n"
        "CPU time of one client in the steps *shares* and *masked*, and of the server "
        "in the whole round, without training and Flower; 32 bits, threshold 0.67, a "
        "tenth of the clients drops out before its words arrive. "
        "Bytes are those of one client that are added to the masked words, which have "
        "the size of the model.\n\n"
        f"{markdown(columns, rows)}\n"
        "## Images that can be read\n\n"
        f"Digits, {CLIENTS} clients, model `mlp`: the change of a neuron's "
        "weights divided by that of its bias is compared with each image of the first "
        f"client. The table shows the share of its images above {LIKE:g} dB, and the "
        "median over its images. *Plain* is what the server receives without secure "
        "aggregation; *masked words* are what it receives with it; the *mean* is what "
        "it learns with it.\n\n"
        f"{markdown(seen, found)}\n"
        "## Difference from plain runs\n\n"
        "Largest difference of a value of the shared model between a run with secure "
        "aggregation and a plain run of the same seed. Digits, model `mlp-2` "
        "(`lg-fedavg`: `mlp`, `fedbn`: `resnet20`), 5 clients, 2 rounds. With 32 bits, "
        "the mean of the first round is off by up to 1e-8, and training can amplify "
        "this in the second. 0 is equality to the last bit.\n\n"
        f"{markdown(['algorithm', '32 bits', '64 bits'], exact)}"
    )
    title = "Secure aggregation: cost, what it hides, and how exact it is"
    write("secure", title, body, {"seen": data, "difference": exact})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
