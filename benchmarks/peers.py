"""Other libraries on the same work, in turn, in one run.

CIFAR-10 as an image folder in 100 clients of 5 shards, 10 of them a round, batches of
10, plain SGD of 0.01, PFLlib's CNN, no augmentation, one thread, nothing evaluated
while it is timed. Each library runs in processes of its own (``peer_apps``) and notes
the end of each round. Nothing is fetched: what is not given is not run.
"""

import argparse
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from json import loads
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import RESULTS, write
from peers_page import BARE, page, plot

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peer_apps.ours import CLIENTS, FRACTION, images  # noqa: E402
from benchmarks.peer_apps.work import (  # noqa: E402
    BATCH,
    LEARNING_RATE,
    Job,
    descendants,
    initial_model,
    read_client,
)
from strategies.server.sampling import Sampler  # noqa: E402

DRIVERS = "benchmarks.peer_apps"
# Linux's number of it: those whose parents have ended become children of this process.
PR_SET_CHILD_SUBREAPER = 36
LONGEST = 900
# Head epochs and epochs of what is shared.
WORKS = {
    "FedRep, 10 + 1 epochs": (10, 1),
    "FedRep, 1 + 1 epochs": (1, 1),
    "FedAvg, 1 epoch": (0, 1),
}
FEDREP, SHORT, FEDAVG = WORKS


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
    flower : bool, default False
        Whether it starts Flower's programs.
    """

    work: str
    name: str
    command: tuple[str, ...]
    shown: str
    folder: str = ""
    flower: bool = False


@dataclass
class Found:
    """What a peer has taken and done, over the passes.

    Parameters
    ----------
    seconds, cpu : list of list of float
        Of each round behind the first, by pass.
    steps : list of float
        A round.
    moved : list of float
        Distance from the initial shared model to the final one.
    agrees : list of float
        Cosine of that way with the bare loop's of the same pass.
    loss : list of float
        Of the final model on a tenth of all training examples; FedAvg only.
    """

    seconds: list[list[float]] = field(default_factory=list)
    cpu: list[list[float]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    agrees: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)

    @property
    def round(self) -> float:
        """Median seconds of a round, over all passes."""
        return median(s for each in self.seconds for s in each)

    @property
    def cpu_round(self) -> float:
        """Median CPU seconds of a round, over all passes."""
        return median(s for each in self.cpu for s in each)


def driver(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the arguments with which a Python runs a driver."""
    return "-m", f"{DRIVERS}.{name}", *arguments


def own(work: str, name: str, *arguments: str) -> Peer:
    """Return a peer that runs in this interpreter."""
    words = driver(*arguments)
    return Peer(
        work=work,
        name=name,
        command=(sys.executable, *words),
        shown=" ".join(("python", *words)),
    )


def rounds_of(work: str, rounds: int) -> int:
    """Return how many rounds a work has: half as many where each is long."""
    head_epochs, epochs = WORKS[work]
    return rounds if head_epochs + epochs < 10 else max(2, rounds // 2)


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
        name="PFLlib",
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
        work=FEDAVG,
        name="Flower, `flwr run`, 1 CPU a client",
        command=(program, *words),
        shown=f"flwr {shown}",
        flower=True,
    )


def blazefl(python: str, name: str, how: str) -> Peer:
    """Return BlazeFL."""
    words = driver("with_blazefl", how)
    return Peer(
        work=FEDAVG,
        name=name,
        command=(python, *words),
        shown=" ".join(("python", *words)),
    )


def peers(given: argparse.Namespace) -> tuple[list[Peer], list[tuple[str, str]]]:
    """Return who is run, in turn, and which work of whom is not."""
    ran, left = [], []
    for work in WORKS:
        ran.append(own(work, BARE, "bare"))
        if work == FEDAVG:
            ran.append(own(work, f"{BARE}, channels last", "bare", "channels-last"))
        ran.append(own(work, "flwr-frl, inline", "ours", "inline"))
        if given.pfllib and given.pfllib_python:
            rounds = rounds_of(work, given.rounds)
            ran.append(pfllib(work, given.pfllib_python, rounds))
        else:
            left.append((work, "PFLlib"))
    hows = {"BlazeFL, one by one": "one", "BlazeFL, 2 processes": "processes"}
    for name, how in hows.items():
        if given.blazefl_python:
            ran.append(blazefl(given.blazefl_python, name, how))
        else:
            left.append((FEDAVG, name))
    return [
        *ran,
        own(FEDAVG, "flwr-frl, Ray, 2 workers", "ours", "ray"),
        flower(),
    ], left


def write_examples(home: Path, data_dir: str) -> None:
    """Write each client's normalised images as PFLlib reads them."""
    data = images(data_dir)
    for part, of in (("train", data.train_examples), ("test", data.test_examples)):
        folder = home / "dataset" / "Cifar10" / part
        folder.mkdir(parents=True)
        for client in range(CLIENTS):
            examples = of(client)
            (x, y), *_ = examples.batches(len(examples))
            arrays = {"x": np.ascontiguousarray(x.numpy()), "y": y.numpy()}
            np.savez(folder / f"{client}.npz", data=np.array(arrays, dtype=object))


def sampled(rounds: int) -> list[list[int]]:
    """Return the clients that flwr-frl samples, from 0, for all who can be told."""
    sampler = Sampler(FRACTION, 1, 0)
    return [sampler.sample(i, list(range(CLIENTS))) for i in range(1, rounds + 1)]


def run(peer: Peer, home: Path, data_dir: str, rounds: int) -> tuple[Any, Any]:
    """Let a peer do its work; return its notes and its final model."""
    places = {name: home / name for name in ("notes", "model", "job", "log")}
    for path in places.values():
        path.unlink(missing_ok=True)
    head_epochs, epochs = WORKS[peer.work]
    Job(
        folder=str(home / "dataset" / "Cifar10" / "train"),
        data_dir=data_dir,
        notes=str(places["notes"]),
        model=str(places["model"]),
        root=os.getpid(),
        head_epochs=head_epochs,
        epochs=epochs,
        sampled=sampled(rounds),
    ).write(places["job"])
    try:
        with open(places["log"], "wb") as log:
            subprocess.run(
                peer.command,
                cwd=home / peer.folder,
                env=environment(home, peer.flower),
                stdout=log,
                stderr=log,
                timeout=LONGEST,
                check=True,
            )
        notes = [loads(line) for line in places["notes"].read_text().splitlines()]
        assert len(notes) == rounds, f"{len(notes)} of {rounds} rounds"
        return notes, torch.load(places["model"])
    except (subprocess.SubprocessError, OSError, AssertionError):
        print(places["log"].read_text(errors="replace")[-3000:], flush=True)
        raise
    finally:
        end_all()


def environment(home: Path, flower: bool) -> dict[str, str]:
    """Return a peer's environment: one thread, this checkout, its job."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    shared = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "PYTHONWARNINGS": "ignore",
        "PEERS_JOB": str(home / "job"),
    }
    if not flower:
        return shared
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return shared | {
        "FLWR_HOME": tempfile.mkdtemp(dir=home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        "PATH": programs,
    }


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def end_all() -> None:
    """End what a peer has left behind, a SuperLink say."""
    deadline = time.monotonic() + 5
    while left := [pid for pid in descendants(os.getpid()) if not reaped(pid)]:
        late = time.monotonic() > deadline
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.2)


def reaped(pid: int) -> bool:
    """Return whether a process has ended, and forget it where it is a child."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return not Path(f"/proc/{pid}").exists()


def add(
    found: Found,
    notes: list[dict[str, float]],
    model: list[torch.Tensor],
    bare: list[torch.Tensor],
    some: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Add what one pass has shown."""
    pairs = list(pairwise(notes))
    found.seconds.append([b["time"] - a["time"] for a, b in pairs])
    found.cpu.append([b["cpu"] - a["cpu"] for a, b in pairs])
    found.steps.append(notes[-1]["steps"] / len(notes))
    way, other = displacement(model), displacement(bare)
    found.moved.append(way.norm().item())
    found.agrees.append(torch.cosine_similarity(way, other, dim=0).item())
    if len(model) == len(list(initial_model().parameters())):
        found.loss.append(loss(model, some))


def displacement(model: list[torch.Tensor]) -> torch.Tensor:
    """Return how far the parameters are from the initial ones, as one vector."""
    pairs = zip(model, initial_model().parameters(), strict=False)
    return torch.cat([(new - old.detach()).flatten() for new, old in pairs])


@torch.no_grad()
def loss(model: list[torch.Tensor], some: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return a model's mean loss on some examples."""
    whole = initial_model()
    for own_one, value in zip(whole.parameters(), model, strict=True):
        own_one.copy_(value)
    return torch.nn.functional.cross_entropy(whole(some[0]), some[1]).item()


def every_tenth(home: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tenth of each client's training examples."""
    folder = home / "dataset" / "Cifar10" / "train"
    parts = [read_client(folder, client) for client in range(CLIENTS)]
    return torch.cat([x[::10] for x, _ in parts]), torch.cat(
        [y[::10] for _, y in parts]
    )


def measure(
    given: argparse.Namespace, home: Path, ran: list[Peer]
) -> dict[str, dict[str, Found]]:
    """Return what each peer has taken for each work, in passes one after the other."""
    some = every_tenth(home)
    found: dict[str, dict[str, Found]] = {work: {} for work in WORKS}
    for number in range(1, given.passes + 1):
        bare: dict[str, list[torch.Tensor]] = {}
        for peer in ran:
            rounds = rounds_of(peer.work, given.rounds)
            notes, model = run(peer, home, given.data_dir, rounds)
            bare.setdefault(peer.work, model)
            own_one = found[peer.work].setdefault(peer.name, Found())
            add(own_one, notes, model, bare[peer.work], some)
            print(
                f"pass {number}, {peer.work}, {peer.name}: "
                f"{median(own_one.seconds[-1]):.2f} s a round, CPU "
                f"{median(own_one.cpu[-1]):.2f} s, {own_one.steps[-1]:.0f} steps, "
                f"moved {own_one.moved[-1]:.4f}, cosine {own_one.agrees[-1]:.3f}, "
                f"loss {own_one.loss[-1:]}",
                flush=True,
            )
    return found


def version(python: str, package: str) -> str:
    """Return the version of a package, and of Python and torch beside it."""
    code = (
        "import platform, torch; from importlib.metadata import version; "
        f"print({f'version({package!r})' if package else repr('')}, "
        "'(Python ' + platform.python_version() + ', torch ' + torch.__version__ + ')')"
    )
    ran = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    )
    return ran.stdout.strip()


def versions(given: argparse.Namespace) -> dict[str, str]:
    """Return the version of each library that runs."""
    found = {"Flower": version(sys.executable, "flwr")}
    if given.pfllib and given.pfllib_python:
        about = version(given.pfllib_python, "")
        found["PFLlib"] = f"commit {given.pfllib_commit or 'unknown'} {about}"
    if given.blazefl_python:
        found["BlazeFL"] = version(given.blazefl_python, "blazefl")
    return found


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="CIFAR-10 as image folder")
    parser.add_argument("--pfllib", help="a checkout of PFLlib; a copy of it is run")
    parser.add_argument("--pfllib-python", help="Python with what PFLlib needs")
    parser.add_argument("--pfllib-commit", default="", help="named on the page")
    parser.add_argument("--blazefl-python", help="Python with BlazeFL")
    parser.add_argument("--rounds", type=int, default=4, help="the first warms up")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--only", default="", help="part of names; no page")
    given = parser.parse_args()
    given.data_dir = str(Path(given.data_dir).resolve())
    for name in ("pfllib", "pfllib_python", "blazefl_python"):
        if place := getattr(given, name):
            if not Path(place).exists():
                parser.error(f"{place} does not exist")
            # Not what a link stands for: a virtual environment is where its link is.
            setattr(given, name, str(Path(place).absolute()))
    return given


def main() -> None:
    """Measure and write ``results/peers``."""
    given = arguments()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    torch.set_num_threads(1)
    ran, left = peers(given)
    if given.only:
        ran = [p for p in ran if given.only in p.name or p.name == BARE]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_examples(home, given.data_dir)
        shutil.copytree(Path(__file__).parent / "peer_apps" / "flower", home / "app")
        if given.pfllib:
            shutil.copytree(Path(given.pfllib) / "system", home / "system")
        print("the clients' examples are written", flush=True)
        found = measure(given, home, ran)
    if given.only:
        return
    write(
        "peers",
        "Other libraries on the same work",
        page(
            found,
            left,
            versions(given),
            list(dict.fromkeys((peer.name, peer.shown) for peer in ran)),
            given.passes,
        ),
        {
            "versions": versions(given),
            "works": {
                work: {name: vars(each) for name, each in of.items()}
                for work, of in found.items()
            },
            "not run": left,
        },
    )
    plot(found, RESULTS / "peers.png")


if __name__ == "__main__":
    main()
