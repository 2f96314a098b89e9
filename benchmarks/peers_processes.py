"""Data and separate processes for each peer of ``peers.py``."""

import ctypes
import os
import subprocess
import tempfile
from json import loads
from pathlib import Path
from typing import Any

import numpy as np
import torch
from federation import ROOT, local_flower

from benchmarks.peer_apps.ours import images
from benchmarks.peer_apps.work import CLIENTS, WIDTH, Job
from benchmarks.peers_commands import FEDAVG, SOFTMAX, WORKS, Peer
from flwr_frl.strategies.server.round import Participation

# Value in Linux's prctl.h
PR_SET_CHILD_SUBREAPER = 36
LONGEST = 900
# Number of training examples per client of the softmax regression
VECTORS = 50


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
