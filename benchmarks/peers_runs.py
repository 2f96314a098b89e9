"""The works of ``peers.py``, the command of each peer, its data and its process."""

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any

import numpy as np
import torch
from federation import ROOT, local_flower

from benchmarks.peer_apps.ours import images
from benchmarks.peer_apps.work import BATCH, CLIENTS, LEARNING_RATE, WIDTH, Job
from flwr_frl.strategies.server.round import Participation

# Value in Linux's prctl.h
PR_SET_CHILD_SUBREAPER = 36
LONGEST = 900
# Number of training examples per client of the softmax regression
VECTORS = 50
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


def train_folder(home: Path, work: str) -> Path:
    """Return the folder of the clients' training examples."""
    return home / "dataset" / WORKS[work].data / "train"


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants.

    Otherwise, the CPU time of daemons such as a SuperLink would not be counted. They
    are not waited for; those that have ended are removed when this process ends.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def write_examples(home: Path, data_dir: str) -> None:
    """Write each client's normalised images in PFLlib's format."""
    data = images(data_dir)
    for part, of in (("train", data.train_examples), ("test", data.test_examples)):
        for client in range(CLIENTS):
            examples = of(client)
            (x, y), *_ = examples.batches(len(examples))
            write_client(train_folder(home, FEDAVG).with_name(part), client, x, y)


def write_vectors(home: Path) -> None:
    """Write each client's examples of the softmax regression in PFLlib's format."""
    draw = torch.Generator().manual_seed(0)
    teacher = torch.randn(WIDTH, 10, generator=draw)
    for client in range(CLIENTS):
        x = torch.randn(VECTORS, WIDTH, generator=draw)
        y = (x @ teacher).argmax(1)
        for part in ("train", "test"):
            write_client(train_folder(home, SOFTMAX).with_name(part), client, x, y)


def write_client(folder: Path, client: int, x: torch.Tensor, y: torch.Tensor) -> None:
    """Write a client's examples in PFLlib's format."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {"x": np.ascontiguousarray(x.numpy()), "y": y.numpy()}
    np.savez(folder / f"{client}.npz", data=np.array(arrays, dtype=object))


def sampled(rounds: int, fraction: float) -> list[list[int]]:
    """Return the clients (from 0) that flwr-frl samples, for the other libraries."""
    sampler = Participation(fraction, 1, 0)
    return [sampler.sample(i, list(range(CLIENTS))) for i in range(1, rounds + 1)]


def settings(job: Path) -> dict[str, str]:
    """Return a peer's environment variables: one thread, this checkout, its job."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "PYTHONWARNINGS": "ignore",
        "PEERS_JOB": str(job),
    }


def run(peer: Peer, home: Path, data_dir: str, rounds: int) -> tuple[Any, Any]:
    """Run a peer; return its notes and its final model."""
    places = {name: home / name for name in ("notes", "model", "job", "log")}
    for path in places.values():
        path.unlink(missing_ok=True)
    work = WORKS[peer.work]
    Job(
        folder=str(train_folder(home, peer.work)),
        data_dir=data_dir,
        notes=str(places["notes"]),
        model=str(places["model"]),
        root=os.getpid(),
        head_epochs=work.head_epochs,
        epochs=work.epochs,
        sampled=sampled(rounds, work.fraction),
        model_name=work.model,
        every=work.every,
    ).write(places["job"])
    try:
        # Flower requires `local_flower`. For every peer, it ends the processes that
        # were left behind.
        with (
            open(places["log"], "wb") as log,
            local_flower(Path(tempfile.mkdtemp(dir=home))) as environment,
        ):
            subprocess.run(
                peer.command,
                cwd=home / peer.folder,
                env=environment | settings(places["job"]),
                stdout=log,
                stderr=log,
                timeout=LONGEST,
                check=True,
            )
        notes = [loads(line) for line in places["notes"].read_text().splitlines()]
        expected = rounds // work.every
        assert len(notes) == expected, f"{len(notes)} of {expected} notes"
        return notes, torch.load(places["model"])
    except (subprocess.SubprocessError, OSError, AssertionError):
        print(places["log"].read_text(errors="replace")[-3000:], flush=True)
        raise
