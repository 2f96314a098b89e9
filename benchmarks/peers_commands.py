"""What the works of ``peers.py`` are, and the command with which each peer does one."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peer_apps.work import BATCH, CLIENTS, FRACTION, LEARNING_RATE
from benchmarks.peers_names import (
    BARE,
    BLAZEFL,
    BLAZEFL_PROCESSES,
    CHANNELS_LAST,
    FLOWER,
    INLINE,
    PFLLIB,
    RAY,
)

DRIVERS = "benchmarks.peer_apps"
# Head epochs and epochs of what is shared.
WORKS = {
    "FedRep, 10 + 1 epochs": (10, 1),
    "FedRep, 1 + 1 epochs": (1, 1),
    "FedAvg, 1 epoch": (0, 1),
}
FEDAVG = list(WORKS)[-1]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What does a work.

    Parameters
    ----------
    work : str
        A key of ``WORKS``.
    name : str
        What it is called.
    command : tuple of str
        What is run.
    shown : str
        The same, without this machine's places.
    folder : str, default ""
        Where it is run, in the folder of all; there by default.
    """

    work: str
    name: str
    command: tuple[str, ...]
    shown: str
    folder: str = ""


def rounds_of(work: str, rounds: int) -> int:
    """Return how many rounds a work has: half as many where each is long."""
    head_epochs, epochs = WORKS[work]
    return rounds if head_epochs + epochs < 10 else max(2, rounds // 2)


def driver(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the arguments with which a Python runs a driver."""
    return "-m", f"{DRIVERS}.{name}", *arguments


def driven(python: str, work: str, name: str, *arguments: str) -> Peer:
    """Return a peer that is nothing but a driver, in some interpreter."""
    words = driver(*arguments)
    return Peer(
        work=work,
        name=name,
        command=(python, *words),
        shown=" ".join(("python", *words)),
    )


def pfllib(work: str, python: str, rounds: int) -> Peer:
    """Return PFLlib with its arguments for a work."""
    head, epochs = WORKS[work]
    algorithm = f"-algo FedRep -pls {head}" if head else "-algo FedAvg"
    arguments = (
        f"{algorithm} -ls {epochs} -data Cifar10 -m CNN -ncl 10 -nc {CLIENTS} "
        f"-jr {FRACTION} -lbs {BATCH} -lr {LEARNING_RATE} -gr {rounds - 1} "
        f"-eg {rounds} -dev cpu"
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
    """Return Flower's own strategy in an app, in its simulation."""
    settings = f"num-supernodes={CLIENTS} client-resources-num-cpus=1"
    words = ("run", "app", "local", "--stream", "--federation-config", settings)
    shown = " ".join((*words[:-1], f"'{settings}'"))
    program = str(Path(sys.executable).parent / "flwr")
    return Peer(
        work=FEDAVG, name=FLOWER, command=(program, *words), shown=f"flwr {shown}"
    )


def peers(given: argparse.Namespace) -> tuple[list[Peer], list[tuple[str, str]]]:
    """Return who is run, in turn, and which work of whom is not."""
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
    for name, how in {BLAZEFL: "one", BLAZEFL_PROCESSES: "processes"}.items():
        if python := given.blazefl_python:
            ran.append(driven(python, FEDAVG, name, "with_blazefl", how))
        else:
            left.append((FEDAVG, name))
    return [*ran, driven(here, FEDAVG, RAY, "ours", "ray"), flower()], left
