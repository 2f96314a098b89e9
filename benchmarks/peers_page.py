"""The page of ``peers.py``: tables and differences."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from benchmarks.common import markdown
from benchmarks.peers_commands import BARE, SOFTMAX, WORKS
from benchmarks.peers_found import Found

COLUMNS = (
    "",
    "CPU s a round",
    "/ bare loop",
    "each pass",
    "seconds a round",
    "/ bare loop",
    "steps a round",
    "moved",
    "cosine",
    "loss",
)
ABOUT = """\
CIFAR-10 in 100 clients of 500 images (5 shards), 10 clients per round, batches of 10, \
plain SGD with learning rate 0.01, PFLlib's CNN (two convolutions, 512 hidden units; \
the last layer is the head), no augmentation, one thread, no evaluation during the \
measurement. For softmax, the model is softmax regression from 64 inputs to 10 \
classes, and each of 100 clients has 50 random examples, labelled by a random linear \
model; all clients train in every round. Libraries that need a message between \
processes for each client are compared with the CNN only.

Number of passes: {passes}. In each, all libraries run one after the other. The \
time of a round is the median over the passes and over all rounds except the first of \
each run (softmax: the first {every}, and each value is the mean of {every} rounds). \
CPU time is summed over all processes of a library. Other processes run on the machine \
at the same time, so CPU time is more reliable than seconds. It also increases when \
both cores are busy, as with two processes.

"""
CHECKS = """
To verify that the work is the same, the steps are counted. All libraries begin with \
the same weights and sample the same clients in the same rounds, except Flower, whose \
node ids are random. The minibatches differ. `moved` is the distance between the \
initial and the final shared model, `cosine` is the cosine similarity of this change \
with that of the bare loop in the same pass, and `loss` is the loss of the final \
model on a tenth of all training examples.

Differences:

- The bare loop has the examples of all its clients in memory as floats before the \
measurement starts, and exchanges no messages. The variant with channels last stores \
them in the memory layout for which torch's convolutions are fast on a CPU. flwr-frl \
uses this layout too, so it can be faster than the first variant. Its own overhead is \
the difference from the second.
- flwr-frl computes the features of a frozen representation once for all head epochs, \
and not in batches of 10. This is not possible with augmented images and \
`augment-head=true`, the default, or with dropout below the head; the work is then the \
same as for the others. With 1 + 1 epochs it computes the features as often as the \
others, in larger batches. Its images are bytes that are normalised in every epoch; \
the others receive normalised floats. A round includes writing the results. On Ray its \
steps are not counted; its model equals that of inline. Clients of the softmax \
regression train together by default, so one counted step is a step of several \
clients; `one by one` is the same run with `cohort="off"`.
- PFLlib copies the global model to all 100 clients in each round, not to 10, and \
reads a client's file again before training.
- pfl-research and fluke keep the clients' examples in memory. pfl-research does not \
shuffle them: it divides a client's examples into batches once. fluke keeps a model \
and an optimizer for every client that has trained.
- fedjax compiles the local training of one client with XLA, in the first round, which \
is not timed, and trains one client after the other. XLA's convolutions run on the CPU.
- BlazeFL reads a client's file before training. Its pool starts new processes in each \
round, here with `fork`. With `spawn`, which its examples use because of GPUs, each \
process would import torch again. Its thread pool requires a Python without the GIL \
and was not run.
- Flower: a minimal Flower app, [`peer_apps/flower`](../peer_apps/flower), which reads \
a client's file for each message. Messages are sent between processes.

Changes to the libraries:

- PFLlib: its code needs no change for these versions of torch and NumPy. It requires \
h5py, calmsize and cvxpy, and its data in files that `peers.py` writes next to a copy \
of PFLlib. [`with_pfllib.py`](../peer_apps/with_pfllib.py) runs its `main.py`, \
replaces the selection of clients, records the end of each round, and skips the \
evaluation on all examples before the first round, which no option disables. PFLlib's \
logistic regression has 60 inputs for an unknown data set; it is replaced by the one \
with 64.
- BlazeFL: [`with_blazefl.py`](../peer_apps/with_blazefl.py) is a loop over rounds as \
in its examples, without the evaluation after each round. It creates one optimizer \
before the pool starts. The first optimizer makes torch load its compiler; otherwise \
each process of each round would do this, at a cost of more than a second of CPU time.
- pfl-research: [`with_pfl.py`](../peer_apps/with_pfl.py) is its `FederatedAveraging` \
in its `SimulatedBackend`, and samples the clients. It evaluates the clients in the \
first round, which no option disables; that round is not timed.
- fluke: [`with_fluke.py`](../peer_apps/with_fluke.py) is its `CentralizedFL` without \
evaluation. The server's choice of clients is replaced.
- fedjax: [`with_fedjax.py`](../peer_apps/with_fedjax.py) is its `federated_averaging` \
with the same models in Haiku. It waits for JAX at the end of each round.
- Flower: no change.

"""


Works = Mapping[str, Mapping[str, Found]]
Left = list[tuple[str, str]]


def rows_of(work: str, found: Mapping[str, Found], left: Left) -> Iterator[list[str]]:
    """Yield a table row for each library, including those that did not run."""
    base = found[BARE]
    for name, each in found.items():
        steps = median(each.steps)
        yield [
            name,
            f"{each.cpu_round:#.3g}",
            f"{each.cpu_round / base.cpu_round:.2f}",
            " / ".join(f"{median(cpu):#.3g}" for cpu in each.cpu),
            f"{each.round:#.3g}",
            f"{each.round / base.round:.2f}",
            f"{steps:.0f}" if steps else "",
            f"{median(each.moved):.3f}",
            f"{median(each.agrees):.3f}",
            f"{median(each.loss):.2f}" if each.loss else "",
        ]
    for own_work, name in left:
        if own_work == work:
            yield [name, "not run", *[""] * 8]


def tables(found: Works, left: Left) -> str:
    """Return a table for each work."""
    parts = []
    for work, by_name in found.items():
        rows = list(rows_of(work, by_name, left))
        timed = sum(map(len, by_name[BARE].seconds)) * WORKS[work].every
        parts.append(f"{work}, {timed} rounds:\n\n{markdown(COLUMNS, rows)}")
    return "\n".join(parts)


def page(
    found: Works,
    left: Left,
    versions: Mapping[str, str],
    commands: Sequence[tuple[str, str]],
    passes: int,
) -> str:
    """Return the page's text.

    Parameters
    ----------
    found : mapping
        Measurements of each library, by work and name.
    left : list of tuple
        Work and name of each library that did not run.
    versions : mapping
        Version of each library, by name.
    commands : sequence of tuple
        Name and command.
    passes : int
        Number of passes.

    Returns
    -------
    str
        Markdown.
    """
    lines = [f"- {name} {version}" for name, version in versions.items()]
    lines += [f"- {name}: `{command}`" for name, command in commands]
    return (
        ABOUT.format(passes=passes, every=WORKS[SOFTMAX].every)
        + tables(found, left)
        + CHECKS
        + "Versions and commands:\n\n"
        + "\n".join(lines)
        + "\n"
    )
