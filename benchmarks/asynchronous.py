"""Compare asynchronous rounds, SRPFL and synchronous rounds by simulated time.

``python -m benchmarks.asynchronous`` uses the bundled digits, ``images --data-dir DIR``
an image folder (CIFAR-10 for our page), and ``people --data-dir DIR`` the activities of
`benchmarks.natural_tasks.wisdm`. All methods perform about the same number of client
updates. The rounds of a synchronous method do not depend on the clients' speeds, so one
run serves all speed models. Neither synchronous methods nor SRPFL depend on the
communication time, which only changes their clocks. Finished runs in ``--output`` are
reused.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import write
from benchmarks.leaderboard_cells import subset
from benchmarks.runs import Job, carry_out_all, exit_status, finished
from flwr_frl.common.settings import Setting


class Method(NamedTuple):
    """An algorithm, its settings, and the synchronous method it is compared with."""

    algorithm: str
    reference: str
    settings: dict[str, Setting]


METHODS = {
    "fedavg": Method("fedavg", "fedavg", {}),
    "flanp": Method("flanp", "fedavg", {}),
    "fedbuff": Method("fedbuff", "fedavg", {}),
    "fedasync": Method("fedasync", "fedavg", {}),
    "fedrep": Method("fedrep", "fedrep", {}),
    "srpfl": Method("srpfl", "fedrep", {}),
    "fedbuff/fedrep": Method("fedbuff", "fedrep", {"async-base": "fedrep"}),
    "flute": Method("flute", "flute", {}),
    "fedbuff/flute": Method("fedbuff", "flute", {"async-base": "flute"}),
}
SPEEDS: dict[str, dict[str, Setting]] = {
    "fixed": {"speed-model": "fixed"},
    "dynamic": {"speed-model": "dynamic"},
    "groups-10": {"speed-model": "groups", "straggler-fraction": 0.1},
    "groups-30": {"speed-model": "groups", "straggler-fraction": 0.3},
    "correlated": {"speed-model": "correlated", "partition": "class-groups"},
}
COMMUNICATION = (0, 10, 100)
# Number of classes of the images
CLASSES = 10
# Values of ``max-staleness`` whose effect on slow clients is measured
LIMITS = (10, 2)
LIMITED = ("groups-10", "groups-30", "fixed")


class Data(NamedTuple):
    """Clients with their data, and the rounds of all methods.

    Parameters
    ----------
    page, title : str
        Name of the page, and a description of the data.
    settings : dict
        Settings of all runs.
    clients, sampled : int
        Number of clients, and how many of them train at a time.
    buffer : int
        Number of client changes that FedBuff combines into a version.
    rounds, every : int
        Rounds of the synchronous methods, and rounds between tests.
    seeds : int
        Number of seeds.
    speeds : tuple of str
        The speed models.
    communicating : tuple of str
        Speed models that run with every communication time; the others run with 0.
    images : int, default 0
        Training images per client, with half as many test images; 0 uses all images.
    """

    page: str
    title: str
    settings: dict[str, Setting]
    clients: int
    sampled: int
    buffer: int
    rounds: int
    every: int
    seeds: int
    speeds: tuple[str, ...]
    communicating: tuple[str, ...]
    images: int = 0


DATA = {
    "digits": Data(
        "asynchronous",
        "The bundled digits, 20 clients with 2 classes each",
        {"classes-per-client": 2},
        clients=20,
        sampled=10,
        buffer=5,
        rounds=60,
        every=2,
        seeds=3,
        speeds=tuple(SPEEDS),
        communicating=("fixed", "groups-10"),
    ),
    "images": Data(
        "asynchronous-images",
        "CIFAR-10 (16 x 16 pixels), 100 clients with 5 classes and 50 images each",
        {
            "task": "image-folder",
            "classes-per-client": 5,
            "image-size": 16,
            "model": "digits-cnn",
            "augment-head": False,
            "learning-rate": 0.05,
        },
        clients=100,
        sampled=10,
        buffer=5,
        rounds=60,
        every=3,
        seeds=1,
        speeds=tuple(SPEEDS),
        communicating=("groups-10",),
        images=50,
    ),
    "people": Data(
        "asynchronous-people",
        "Activities of 36 people (WISDM), a client each",
        {
            "task": "benchmarks.natural_tasks:wisdm",
            "batch-size": 16,
            "representation-epochs": 2,
            "head-epochs": 2,
            "learning-rate": 0.2,
        },
        clients=36,
        sampled=12,
        buffer=6,
        rounds=40,
        every=2,
        seeds=3,
        # The classes of real people cannot be assigned by speed.
        speeds=tuple(name for name in SPEEDS if name != "correlated"),
        communicating=("fixed", "groups-10"),
    ),
}


class Setup(NamedTuple):
    """The data, the settings of all runs, their folder, and the number of seeds."""

    data: Data
    settings: dict[str, Setting]
    output: Path
    seeds: int


class Run(NamedTuple):
    """A run's method, speed model, communication time, seed and staleness limit."""

    name: str
    speeds: str
    communication: int
    seed: int
    limit: int = -1


def job_of(setup: Setup, run: Run) -> Job:
    """Return a run's job; runs that differ in irrelevant settings share one."""
    method, data = METHODS[run.name], setup.data
    settings: dict[str, Setting] = {**setup.settings, **method.settings}
    settings["seed"] = run.seed
    speeds = SPEEDS[run.speeds]
    partition = {k: v for k, v in speeds.items() if k == "partition"}
    settings |= partition
    place = [run.name.replace("/", "-"), *partition.values(), f"seed-{run.seed}"]
    per_version = {"fedbuff": data.buffer, "fedasync": 1}.get(method.algorithm, 0)
    if method.algorithm != method.reference:
        settings |= speeds
        place.insert(1, run.speeds)
    if per_version:
        settings |= {
            "communication-time": float(run.communication),
            "concurrency": data.sampled,
            "num-server-rounds": data.rounds * data.sampled // per_version,
            "evaluate-every": data.every * data.sampled // per_version,
        }
        if method.algorithm == "fedbuff":
            settings["buffer-size"] = data.buffer
        place.insert(2, f"communication-{run.communication}")
        if run.limit >= 0:
            settings["max-staleness"] = run.limit
            place.insert(3, f"limit-{run.limit}")
    return Job(setup.output.joinpath(*map(str, place)), method.algorithm, settings)


def times_of(data: Data, speeds: str) -> tuple[int, ...]:
    """Return the communication times of a speed model."""
    return COMMUNICATION if speeds in data.communicating else COMMUNICATION[:1]


def limited_speeds(data: Data) -> list[str]:
    """Return the speed models for which staleness limits are measured."""
    return [speeds for speeds in LIMITED if speeds in data.speeds]


def runs_of(setup: Setup) -> Iterator[Run]:
    """Yield all runs; several runs may share a job."""
    data = setup.data
    for communication in COMMUNICATION:
        for seed in range(setup.seeds):
            for speeds in data.speeds:
                if communication in times_of(data, speeds):
                    for name in METHODS:
                        yield Run(name, speeds, communication, seed)
    for seed in range(setup.seeds):
        for speeds in limited_speeds(data):
            for limit in LIMITS:
                yield Run("fedbuff", speeds, 0, seed, limit)


def missing_jobs(setup: Setup) -> list[Job]:
    """Return the unfinished jobs, without duplicates."""
    jobs = {job.place: job for job in (job_of(setup, run) for run in runs_of(setup))}
    return [job for job in jobs.values() if finished(job) is None]


def setup_of(arguments: argparse.Namespace) -> Setup:
    """Return the setup that the arguments select."""
    data, output = DATA[arguments.data], Path(arguments.output) / arguments.data
    settings: dict[str, Setting] = {
        "num-clients": data.clients,
        "fraction-train": data.sampled / data.clients,
        "num-server-rounds": data.rounds,
        "evaluate-every": data.every,
        "evaluate-last": 1,
        **data.settings,
    }
    if arguments.data_dir:
        folder = Path(arguments.data_dir).absolute()
        if data.images:
            output.mkdir(parents=True, exist_ok=True)
            train = data.clients * data.images // CLASSES
            folder = subset(folder, output.absolute(), train, train // 2)
        settings["data-dir"] = str(folder)
    return Setup(data, settings, output, arguments.seeds or data.seeds)


def main() -> int:
    """Carry out the missing runs, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", choices=list(DATA), default="digits")
    parser.add_argument("--data-dir", default="", help="folder of the data")
    parser.add_argument("--seeds", type=int, default=0, help="0: default of the data")
    parser.add_argument("--output", default="results/asynchronous")
    arguments = parser.parse_args()
    setup = setup_of(arguments)

    def make() -> None:
        # Imported here, because the module of the page imports this one.
        from benchmarks.asynchronous_page import page_of

        def waiting() -> list[Job]:
            return missing_jobs(setup)

        carry_out_all(setup.data.page, waiting(), waiting)
        write(setup.data.page, *page_of(setup))

    return exit_status(make)


if __name__ == "__main__":
    raise SystemExit(main())
