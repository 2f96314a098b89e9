"""Compare the package on 64-bit ARM, under QEMU's user emulation, with this machine.

``python -m benchmarks.aarch64 --qemu PATH --root DIR`` runs the linear task and the
bundled digits with an ARM Python, repeats the commands with this machine's Python, and
reports the largest relative difference between the results. A SuperNode on ARM then
trains one round with a SuperLink on this machine, and so does a SuperNode on this
machine.

PATH is ``usr/bin/qemu-aarch64-static`` of Debian's ``qemu-user-static``; binfmt is not
needed. DIR is the root of an unpacked Debian with the dependencies in ``opt/site``. It
is built without running any program in it::

    debootstrap --arch=arm64 --foreign --variant=minbase --include=python3 bookworm DIR
    for package in DIR/var/cache/apt/archives/*.deb; do dpkg-deb -x $package DIR; done
    arm="--target DIR/opt/site --no-compile --only-binary=:all: --python-version 3.11
        --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64
        --platform manylinux_2_27_aarch64 --platform manylinux_2_26_aarch64
        --platform manylinux_2_24_aarch64"
    pip install $arm "flwr<1.44" greenlet networkx numpy pillow rich safetensors \
        scikit-learn filelock fsspec jinja2 setuptools sympy
    pip install $arm --no-deps torch==2.7.1 torchvision==0.22.1

The last command warns that ``bin`` exists and leaves it unchanged. The script was
tested with torch 2.7.1, whose ARM wheel needs no CUDA libraries.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benchmarks.common import markdown, write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from devices import write_folders  # noqa: E402
from federation import BIN, Federation, read_lines  # noqa: E402

# Inline, because Ray starts programs by their full paths.
RUNS = {
    "linear": "fedrep --task linear --clients 4 --rounds 3 --backend inline",
    "digits": "fedrep --task digits --clients 5 --rounds 2 --backend inline"
    " --run-config 'head-epochs=1 batch-size=32'",
}
ROUND = {
    "algorithm": "fedrep",
    "task": "image-folder",
    "model": "digits-cnn",
    "num-clients": 1,
    "num-server-rounds": 1,
    "fraction-train": 1.0,
    "evaluate-every": 1,
    "head-epochs": 1,
    "batch-size": 6,
    "augment": False,
}
SUPERNODE = "SuperNode"
DEVICE = "000000"
# Smaller values are rounding errors, whose relative difference is meaningless.
ZERO = 1e-12
# Seconds. Emulation is about 20 times slower than native execution.
LIMIT = 900.0
VERSIONS = """
import platform
from importlib.metadata import version
names = ("torch", "torchvision", "numpy", "scikit-learn", "grpcio", "flwr")
print(f"{platform.machine()}, Python {platform.python_version()},",
      ", ".join(f"{name} {version(name)}" for name in names))
"""


def write_programs(qemu: Path, root: Path, folder: Path) -> None:
    """Write scripts that run Python and Flower's programs of the ARM root under QEMU.

    Emulated programs start others by name, and the kernel cannot execute ARM files.
    These scripts therefore come first in their PATH.
    """
    folder.mkdir()
    site = root / "opt" / "site"
    for name in ("python", "flower-supernode", "flower-superexec", "flwr-clientapp"):
        command: list[Path | str] = [qemu, "-L", root, root / "usr/bin/python3"]
        if name != "python":
            command.append(site / "bin" / name)
        path = folder / name
        path.write_text(
            f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(f'{ROOT}:{site}')}\n"
            f'exec {shlex.join(map(str, command))} "$@"\n'
        )
        path.chmod(0o755)


def numbers(output: Path) -> dict[str, float | np.ndarray]:
    """Return the metrics of all rounds and clients of a run, and its final arrays."""
    found: dict[str, float | np.ndarray] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for inner in value:
                add(f"{name} {inner}", value[inner])
        elif isinstance(value, int | float):
            found[name] = float(value)

    for path in sorted(output.glob("*/metrics.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            del row["seconds"]
            add(f"{path.parent.name} {row['round']}", row)
    for path in sorted(output.glob("*/checkpoint.safetensors")):
        for name, array in load_file(path).items():
            if np.issubdtype(array.dtype, np.floating):
                found[f"{path.parent.name} model {name}"] = array
    return found


def compare(case: str, arm: Path, here: Path) -> tuple[dict[str, Any], list[object]]:
    """Return the largest relative differences of two runs, as data and as a row."""
    left, right = numbers(arm), numbers(here)
    if not right or left.keys() != right.keys():
        sys.exit(f"{case}: {sorted(left.keys() ^ right.keys())} are in one run only")
    differences: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for name, value in right.items():
        size = max(np.linalg.norm(value), np.linalg.norm(left[name]))
        difference = float(np.linalg.norm(left[name] - value) / size) if size else 0.0
        if size > ZERO or difference == 0:
            differences[isinstance(value, float)][name] = difference
    metrics, arrays = differences[True], differences[False]
    worst = max(metrics, key=metrics.__getitem__)
    row = [case, len(metrics), f"{metrics[worst]:.1e}", worst, len(arrays)]
    largest = max(arrays.values())
    return {"metrics": metrics, "arrays": arrays}, [*row, f"{largest:.1e}"]


def simulate(python: Path, command: str, output: Path) -> None:
    """Run a simulation in one process."""
    program = [
        python,
        ROOT / "simulation.py",
        *shlex.split(command),
        "--output",
        output,
    ]
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(program, cwd=ROOT, env=settings, check=True, timeout=LIMIT)


def train_one_round(home: Path, programs: Path) -> None:
    """Train one round on a SuperNode that uses the programs in a folder."""
    write_folders(home / "data", 1)
    federation = Federation(home / "federation")
    try:
        federation.start_superlink()
        config = f'client-name="{DEVICE}" data-dir="{home / "data" / DEVICE}"'
        program = programs / "flower-supernode"
        federation.start_supernode(DEVICE, config, program=program)
        config = {**ROUND, "round-timeout": LIMIT, "output": str(home)}
        text = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        log = federation.run(ROOT, text, LIMIT)
    finally:
        federation.close()
    rows = read_lines(home / "fedrep" / "metrics.jsonl")
    if [row.get("clients") for row in rows] != [1]:
        sys.exit(log + (federation.home / f"{DEVICE}.log").read_text())


def run_case(case: str, programs: Path, output: Path) -> None:
    """Run one case, a simulation or the SuperNode's round, with one side's programs."""
    if case == SUPERNODE:
        train_one_round(output, programs)
    else:
        simulate(programs / "python", RUNS[case], output)


def main() -> None:
    """Run everything on both sides, compare, and write the page."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--qemu", type=Path, required=True, help="qemu-aarch64-static")
    parser.add_argument("--root", type=Path, required=True, help="Debian for arm64")
    arguments = parser.parse_args()
    rows, data = [], {}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        arm = home / "programs"
        write_programs(arguments.qemu.resolve(), arguments.root.resolve(), arm)
        sides = {"arm": arm, "here": BIN}
        versions = [
            subprocess.check_output([at / "python", "-c", VERSIONS], text=True).strip()
            for at in sides.values()
        ]
        # In parallel, because each case uses one core and imports torch for minutes.
        with ThreadPoolExecutor() as pool:
            started = [
                pool.submit(run_case, case, at, home / f"{case}-{side}")
                for side, at in sides.items()
                for case in (*RUNS, SUPERNODE)
            ]
        for done in started:
            done.result()
        for case in (*RUNS, SUPERNODE):
            outputs = (home / f"{case}-{side}" for side in sides)
            data[case], row = compare(case, *outputs)
            rows.append(row)
    columns = "run|metrics|largest difference|of which metric|arrays|largest difference"
    commands = "\n".join(f"python simulation.py {run}" for run in RUNS.values())
    write(
        "aarch64-emulated",
        "64-bit ARM under emulation, compared with x86-64",
        f"The same commands ran with an ARM Python under QEMU's user emulation "
        f"({versions[0]}) and with this machine's ({versions[1]}). This shows that the "
        f"packages run and compute the same, not how fast a board is.\n\n"
        f"```sh\n{commands}\n```\n\n"
        f"In the last row, a SuperNode on ARM with its ClientApp trained and evaluated "
        f"one round of FedRep with a SuperLink on this machine, over loopback. It is "
        f"compared with a SuperNode on this machine.\n\n"
        + markdown(columns.split("|"), rows)
        + f"\nDifferences are relative. For an array of the final model, it is the "
        f"norm of the difference divided by the larger norm. Values below {ZERO:g} on "
        f"both sides are zero but for rounding and are not compared.\n",
        {"versions": versions, "relative-differences": data},
    )


if __name__ == "__main__":
    main()
