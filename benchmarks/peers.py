"""Compare the speed of other libraries on the same work.

The first work is CIFAR-10 as an image folder in 100 clients of 5 shards, 10 of them per
round: batches of 10, plain SGD with a learning rate of 0.01, PFLlib's CNN, no
augmentation, one thread, and no evaluation during the measurement. The second work is
softmax regression with 64 inputs and 100 clients of 50 examples, which all train in
every round. Each library runs in separate processes (``peer_apps``) and records the end
of each round. Nothing is downloaded; libraries that are not passed as arguments are
skipped.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
# Opacus also installs a package `benchmarks`.
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]

from benchmarks.common import write  # noqa: E402
from benchmarks.peers_page import Found, every_tenth, page  # noqa: E402
from benchmarks.peers_runs import (  # noqa: E402
    FEDJAX,
    FLUKE,
    PFL,
    WORKS,
    Peer,
    adopt_orphans,
    peers,
    rounds_of,
    run,
    train_folder,
    write_examples,
    write_vectors,
)


def measure(
    given: argparse.Namespace, home: Path, ran: list[Peer]
) -> dict[str, dict[str, Found]]:
    """Measure all peers, pass by pass; return the results by work and name."""
    found: dict[str, dict[str, Found]] = {peer.work: {} for peer in ran}
    some = {work: every_tenth(train_folder(home, work)) for work in found}
    for number in range(1, given.passes + 1):
        bare: dict[str, list[torch.Tensor]] = {}
        for peer in ran:
            rounds = rounds_of(peer.work, given.rounds)
            notes, model = run(peer, home, given.data_dir, rounds)
            bare.setdefault(peer.work, model)
            own_one = found[peer.work].setdefault(peer.name, Found(peer.work))
            own_one.add(notes, model, bare[peer.work], some[peer.work])
            print(f"pass {number}, {peer.work}, {peer.name}: {own_one}", flush=True)
    return found


def version(python: str, package: str, *others: str) -> str:
    """Return the versions of a package, of Python and of other packages."""
    beside = [f"', {name} ' + version({name!r})" for name in others or ("torch",)]
    code = (
        "import platform; from importlib.metadata import version; "
        f"print({f'version({package!r})' if package else repr('')}, "
        f"'(Python ' + platform.python_version() + {' + '.join(beside)} + ')')"
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
    for name, python, *packages in (
        ("BlazeFL", given.blazefl_python, "blazefl"),
        (PFL, given.pfl_python, "pfl"),
        (FLUKE, given.fluke_python, "fluke-fl"),
        (FEDJAX, given.fedjax_python, "fedjax", "jax", "dm-haiku"),
    ):
        if python:
            found[name] = version(python, *packages)
    return found


def existing(path: str) -> str:
    """Return an absolute path; fail if there is nothing."""
    if not Path(path).exists():
        raise argparse.ArgumentTypeError(f"{path} does not exist")
    # Links are not resolved, because a virtual environment is found by its link.
    return str(Path(path).absolute())


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--data-dir", type=existing, required=True, help="CIFAR-10 as image folder")
    add("--pfllib", type=existing, help="a checkout of PFLlib; a copy is run")
    add("--pfllib-python", type=existing, help="Python for PFLlib")
    add("--pfllib-commit", default="", help="shown on the page")
    add("--blazefl-python", type=existing, help="Python with BlazeFL")
    add("--pfl-python", type=existing, help="Python with pfl-research and torch")
    add("--fluke-python", type=existing, help="Python with fluke")
    add("--fedjax-python", type=existing, help="Python with fedjax, jax, Haiku, torch")
    add("--rounds", type=int, default=4, help="the first warms up")
    add("--passes", type=int, default=2)
    add("--works", default="", help="filter of works; own page")
    return parser.parse_args()


def main() -> None:
    """Measure and write ``results/peers``."""
    given = arguments()
    adopt_orphans()
    torch.set_num_threads(1)
    ran, left = peers(given)
    ran = [peer for peer in ran if given.works in peer.work]
    left = [(work, name) for work, name in left if given.works in work]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_vectors(home)
        if any(WORKS[peer.work].model == "cnn" for peer in ran):
            write_examples(home, given.data_dir)
        shutil.copytree(Path(__file__).parent / "peer_apps" / "flower", home / "app")
        if given.pfllib:
            shutil.copytree(Path(given.pfllib) / "system", home / "system")
        print("the clients' examples are written", flush=True)
        found = measure(given, home, ran)
    words = re.findall(r"[a-z0-9]+", given.works.lower())
    page_name = "-".join(("peers", *words))
    title = "Other libraries on the same work"
    write(
        page_name,
        f"{title}: {given.works}" if words else title,
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


if __name__ == "__main__":
    main()
