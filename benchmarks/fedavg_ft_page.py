"""Tables and text of ``benchmarks/fedavg_ft.py``."""

from typing import Any

import numpy as np

from benchmarks.common import markdown
from benchmarks.papers_small import CLIENTS, IMAGES, ROUNDS, spread

# Metrics, and the heads with which they are measured.
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
# Heads of FedAvg and of the other method that are compared.
COMPARED = {
    "fresh; as it tests it (as published)": (FRESH, AS_TESTED),
    "fresh; fresh": (FRESH, FRESH),
    "old, of the received model; as it tests it": (OLD, AS_TESTED),
    "old, of the trained model; as it tests it": (OLD_TRAINED, AS_TESTED),
    "from the initial head; from the initial head": (INITIAL, INITIAL),
}
# Of a cell: method, seed, metric.
Runs = dict[str, dict[str, dict[str, Any]]]

BODY = """Accuracy in % is the mean over all clients and the last rounds. In the tables
`shards-2` and `shards-5` there are {clients} clients, of which 3 train per round,
{rounds} rounds, {images} training images a client (CIFAR-10 as JPEG), and means over
the last 5 rounds, as in [the small figures](papers_small.md); seeds: {seeds}. In 100x5
there are 100 clients with 5 shards, of which 10 train per round, 100 rounds, all
images, and means over the last 10 rounds, as in
[the papers' tables](papers_tables.md); {papers}. ± is the standard deviation over
seeds.

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
  (as FedPer's is), and tested on the current representation.
- *From the initial head*: trained before the test from the head of the initial model,
  which is the same for all methods but `lg-fedavg`, so that only the representations
  differ.

The same clients are sampled in all methods, so that kept and old heads have the same
age at a test, on average: {ages}.
{tables}"""
CELL = """
## {cell}

{heads}
FedAvg's lead in points, by its head and by that of the other method:

{comparison}"""


def heads_table(methods: Runs) -> str:
    """Return the accuracy of each method with each head."""
    rows = [
        (
            f"`{method}`",
            *(
                spread([run[name] for run in runs.values() if name in run])
                if name in next(iter(runs.values()))
                else ""
                for name in HEADS
            ),
        )
        for method, runs in methods.items()
    ]
    return markdown(("method", *HEADS.values()), rows)


def ahead_of(methods: Runs, other: str, heads: str) -> list[float]:
    """Return by how many points FedAvg is ahead of a method, by seed."""
    own, its = COMPARED[heads]
    runs, others = methods["fedavg"], methods[other]
    return [runs[s][own] - others[s][its] for s in runs if s in others]


def comparison_table(methods: Runs) -> str:
    """Return the lead of FedAvg over each method with like and unlike heads."""
    others = [method for method in methods if method != "fedavg"]
    rows = [
        (heads, *(spread(ahead_of(methods, other, heads)) for other in others))
        for heads in COMPARED
    ]
    return markdown(("heads", *(f"over `{other}`" for other in others)), rows)


def body(measured: dict[str, Runs], seeds: int, epochs: int, papers: str) -> str:
    """Return the text of the page of all finished runs, by cell."""
    tables = "".join(
        CELL.format(cell=c, heads=heads_table(m), comparison=comparison_table(m))
        for c, m in measured.items()
    )
    ages = [
        f"{np.mean([run[AGE] for run in m['fedavg'].values()]):.1f} rounds in {cell}"
        for cell, m in measured.items()
    ]
    counts = {"clients": CLIENTS, "rounds": ROUNDS, "images": IMAGES, "epochs": epochs}
    numbers = ", ".join(map(str, range(seeds)))
    text = {"seeds": numbers, "ages": ", ".join(ages), "papers": papers}
    return BODY.format(**counts, **text, tables=tables)
