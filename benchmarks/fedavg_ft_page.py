"""Tables and text of ``benchmarks/fedavg_ft.py``."""

from typing import Any

import numpy as np

from benchmarks.common import markdown
from benchmarks.papers_small import CLIENTS, IMAGES, ROUNDS, spread

# Metrics and descriptions of the heads with which they are measured.
AS_TESTED, FRESH, INITIAL = "accuracy", "accuracy-fresh", "accuracy-initial"
OLD, OLD_TRAINED = "accuracy-old-received", "accuracy-old-trained"
HEADS = {
    AS_TESTED: "as the method tests it",
    FRESH: "fresh",
    OLD: "old, of the received model",
    OLD_TRAINED: "old, of the trained model",
    INITIAL: "from the initial head",
}
# Mean number of rounds since a tested client was sampled.
AGE = "head-age"
# Metrics by which FedAvg and another method are compared, by the description of both
# heads.
COMPARED = {
    "fresh; as it tests it (as published)": (FRESH, AS_TESTED),
    "fresh; fresh": (FRESH, FRESH),
    "old, of the received model; as it tests it": (OLD, AS_TESTED),
    "old, of the trained model; as it tests it": (OLD_TRAINED, AS_TESTED),
    "from the initial head; from the initial head": (INITIAL, INITIAL),
}
# Metrics of a cell's runs, by method and seed.
Runs = dict[str, dict[str, dict[str, Any]]]

BODY = """Accuracy in % is the mean over all clients and the last rounds. In the cells
shards-2 and shards-5 there are {clients} clients, of which 3 train per round, {rounds}
rounds, {images} training images per client (CIFAR-10 as JPEG), and means over the last
5 rounds, as in [the small figures](papers_small.md). In 100x5 and 100x2
there are 100 clients with 5 or 2 shards, of which 10 train per round, 100 rounds, all
images, and means over the last 10 rounds, as in [the papers' tables](papers_tables.md).
± is the standard deviation over seeds, and figures without it are of one seed. Methods
that are not in the table of a cell have not been run there.

All heads in a row belong to the same training runs, whose messages are those of the
method. Each head but the first is trained for {epochs} epochs on the client's images,
by cross-entropy alone, with the representation frozen.

- *As the method tests it*: the global head (`fedavg`), or the client's own head of its
  last sampled round (`fedper`, `fedrep`; the server keeps it for `flute`). `lg-fedavg`
  has a shared head of two layers, which is never old, on the client's own
  representation of its last sampled round.
- *Fresh*: the same head, fine-tuned before the test on the representation that is
  tested. With it, `fedavg` is FedAvg-FT.
- *Old*: FedAvg's global head, fine-tuned when the client was last sampled, either on
  the model that it received (as FedRep's head is) or on its model after local training
  (as FedPer's is), and tested on the current representation. It starts from the global
  head each time, while own heads are trained further in each sampled round.
- *From the initial head*: trained before the test from the head of the initial model,
  which is the same for all methods but `lg-fedavg`, so that only the representations
  differ.

The same clients are sampled in all methods, so that kept and old heads have the same
age at a test. In rounds, on average: {ages}.
"""


def heads_table(methods: Runs) -> str:
    """Return the accuracy of each method with each head."""
    rows = [
        (
            f"`{method}`",
            ", ".join(runs),
            *(
                spread([run[name] for run in runs.values() if name in run])
                if name in next(iter(runs.values()))
                else ""
                for name in HEADS
            ),
        )
        for method, runs in methods.items()
    ]
    return markdown(("method", "seeds", *HEADS.values()), rows)


def ahead_of(methods: Runs, other: str, heads: str) -> list[float]:
    """Return by how many points FedAvg is ahead of a method, by seed."""
    metric, metric_of_other = COMPARED[heads]
    runs, others = methods["fedavg"], methods[other]
    return [runs[s][metric] - others[s][metric_of_other] for s in runs if s in others]


def comparison_table(methods: Runs) -> str:
    """Return a table of FedAvg's lead over each method, by the compared heads."""
    others = [method for method in methods if method != "fedavg"]
    rows = [
        (heads, *(spread(ahead_of(methods, other, heads)) for other in others))
        for heads in COMPARED
    ]
    return markdown(("heads", *(f"over `{other}`" for other in others)), rows)


def answer(methods: Runs) -> str:
    """Return a sentence on FedAvg-FT's lead over FedRep with the same kind of head."""
    if "fedrep" not in methods:
        return ""
    published, fresh, old, _, _ = (
        np.mean(ahead_of(methods, "fedrep", heads)) for heads in COMPARED
    )
    return (
        f"FedAvg-FT's lead over FedRep is {published:.1f} points; it is {fresh:.1f} "
        f"if both have fresh heads, and {old:.1f} if both have old ones.\n"
    )


def on_gpus(methods: Runs) -> str:
    """Return a sentence on the runs that were made on a GPU; empty without any."""
    seeds: dict[str, list[str]] = {}
    for method, runs in methods.items():
        for seed, run in runs.items():
            if gpu := run.get("gpu"):
                seeds.setdefault(gpu, []).append(f"`{method}` {seed}")
    lines = [f"Runs on an {gpu}: {', '.join(runs)}.\n" for gpu, runs in seeds.items()]
    return "\n" + "".join(lines) if lines else ""


def cell_text(cell: str, methods: Runs) -> str:
    """Return the tables of a cell, or a note that it has not been run."""
    text = f"\n## {cell}\n\n"
    if "fedavg" not in methods:
        return f"{text}Not run.\n"
    text += heads_table(methods)
    text += on_gpus(methods)
    if len(methods) > 1:
        text += f"\n{answer(methods)}"
        text += (
            "\nFedAvg's lead in points, by its head and by that of the other method, "
            f"mean over the seeds of both:\n\n{comparison_table(methods)}"
        )
    return text


def body(cells: dict[str, Runs], epochs: int) -> str:
    """Return the page below its heading, for all finished runs."""
    ages = [
        f"{np.mean([run[AGE] for run in methods['fedavg'].values()]):.1f} in {cell}"
        for cell, methods in cells.items()
        if "fedavg" in methods
    ]
    text = BODY.format(
        clients=CLIENTS,
        rounds=ROUNDS,
        images=IMAGES,
        epochs=epochs,
        ages=", ".join(ages),
    )
    return text + "".join(cell_text(*each) for each in cells.items())
