"""The works of ``peers.py``, and the command of each peer for a work."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peer_apps.work import BATCH, CLIENTS, LEARNING_RATE

# Names of the peers, on the page
BARE = "bare PyTorch loop"
CHANNELS_LAST = f"{BARE}, channels last"
INLINE = "flwr-frl, inline"
ONE_BY_ONE = "flwr-frl, inline, one by one"
RAY = "flwr-frl, Ray, 2 workers"
PFLLIB = "PFLlib"
BLAZEFL = "BlazeFL, one by one"
BLAZEFL_PROCESSES = "BlazeFL, 2 processes"
PFL = "pfl-research"
FEDJAX = "fedjax"
FLUKE = "fluke"
FLOWER = "Flower, `flwr run`, 1 CPU a client"
DRIVERS = "benchmarks.peer_apps"


@dataclass(frozen=True, kw_only=True)
class Work:
    """The training that every library carries out.

    Parameters
    ----------
    head_epochs, epochs : int
        Epochs of the head, and of the shared parameters.
    model : str, default "cnn"
        A key of ``MODELS``.
    data : str, default "Cifar10"
        Folder with the clients' examples.
    fraction : float, default 0.1
        Share of the clients that is sampled in a round.
    every : int, default 1
        Number of rounds that are timed together.
    """

    head_epochs: int
    epochs: int
    model: str = "cnn"
    data: str = "Cifar10"
    fraction: float = 0.1
    every: int = 1


WORKS = {
    "FedRep, CNN, 10 + 1 epochs": Work(head_epochs=10, epochs=1),
    "FedRep, CNN, 1 + 1 epochs": Work(head_epochs=1, epochs=1),
    "FedAvg, CNN, 1 epoch": Work(head_epochs=0, epochs=1),
    "FedAvg, softmax, 1 epoch": Work(
        head_epochs=0, epochs=1, model="softmax", data="Vectors", fraction=1.0, every=3
    ),
}
FEDAVG, SOFTMAX = list(WORKS)[-2:]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A library or loop that carries out a work.

    Parameters
    ----------
    work : str
        A key of ``WORKS``.
    name : str
        Name on the page.
    command : tuple of str
        Command line.
    shown : str
        Command line for the page, without local paths.
    folder : str, default ""
        Working directory, relative to the common folder.
    """

    work: str
    name: str
    command: tuple[str, ...]
    shown: str
    folder: str = ""


def rounds_of(work: str, rounds: int) -> int:
    """Return the number of rounds of a work; it is halved if rounds are long."""
    own = WORKS[work]
    many = own.head_epochs + own.epochs < 10
    return own.every * (rounds if many else max(2, rounds // 2))


def driver(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the arguments with which Python runs a driver."""
    return "-m", f"{DRIVERS}.{name}", *arguments


def driven(python: str, work: str, name: str, *arguments: str) -> Peer:
    """Return a peer that consists of a driver, run by some interpreter."""
    words = driver(*arguments)
    return Peer(
        work=work,
        name=name,
        command=(python, *words),
        shown=" ".join(("python", *words)),
    )


def pfllib(work: str, python: str, rounds: int) -> Peer:
    """Return the peer of PFLlib, with its arguments for a work."""
    own = WORKS[work]
    head = own.head_epochs
    algorithm = f"-algo FedRep -pls {head}" if head else "-algo FedAvg"
    model = "CNN" if own.model == "cnn" else "MLR"
    arguments = (
        f"{algorithm} -ls {own.epochs} -data {own.data} -m {model} -ncl 10 "
        f"-nc {CLIENTS} -jr {own.fraction} -lbs {BATCH} -lr {LEARNING_RATE} "
        f"-gr {rounds - 1} -eg {rounds} -dev cpu"
    )
    words = driver("with_pfllib", *arguments.split())
    return Peer(
        work=work,
        name=PFLLIB,
        command=(python, *words),
        shown=f"python main.py {arguments}",
        folder="system",
    )


def flower() -> Peer:
    """Return the peer of Flower's FedAvg, an app in Flower's simulation."""
    settings = f"num-supernodes={CLIENTS} client-resources-num-cpus=1"
    words = ("run", "app", "local", "--stream", "--federation-config", settings)
    shown = " ".join((*words[:-1], f"'{settings}'"))
    program = str(Path(sys.executable).parent / "flwr")
    return Peer(
        work=FEDAVG, name=FLOWER, command=(program, *words), shown=f"flwr {shown}"
    )


def peers(given: argparse.Namespace) -> tuple[list[Peer], list[tuple[str, str]]]:
    """Return the peers to run, in order, and the works and names that are skipped."""
    ran, left = [], []
    here = sys.executable
    for work in WORKS:
        ran.append(driven(here, work, BARE, "bare"))
        if work == FEDAVG:
            ran.append(driven(here, work, CHANNELS_LAST, "bare", "channels-last"))
        ran.append(driven(here, work, INLINE, "ours", "inline"))
        if given.pfllib and given.pfllib_python:
            rounds = rounds_of(work, given.rounds)
            ran.append(pfllib(work, given.pfllib_python, rounds))
        else:
            left.append((work, PFLLIB))
    ran.append(driven(here, SOFTMAX, ONE_BY_ONE, "ours", "inline", "off"))
    drivers = {
        PFL: (given.pfl_python, "with_pfl"),
        FLUKE: (given.fluke_python, "with_fluke"),
        FEDJAX: (given.fedjax_python, "with_fedjax"),
        BLAZEFL: (given.blazefl_python, "with_blazefl", "one"),
    }
    processes = (given.blazefl_python, "with_blazefl", "processes")
    # With a small model, libraries with several processes mostly send messages, so they
    # are compared with the CNN only.
    for work, more in ((FEDAVG, {BLAZEFL_PROCESSES: processes}), (SOFTMAX, {})):
        for name, (python, *words) in {**drivers, **more}.items():
            if python:
                ran.append(driven(python, work, name, *words))
            else:
                left.append((work, name))
        if more:
            ran += [driven(here, work, RAY, "ours", "ray"), flower()]
    return ran, left
