"""Functions that all benchmarks share: writing a page and recording its provenance."""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
BEGAN = time.perf_counter()
# For pages on which all algorithms have the same learning rate or number of rounds.
DIFFERENCES = (
    "`fedpac` trains its heads with ten times the learning rate, as its authors do. "
    "`pfedhn` serves the clients of a round one after another and makes a step after "
    "each, so that its rounds take the sum of their times."
)


def _git(*arguments: str) -> str:
    run = ["git", *arguments]
    done = subprocess.run(
        run, cwd=RESULTS.parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _commit() -> str:
    """Return the commit, with ``-dirty`` if more than this benchmark's pages changed.

    The pages that a benchmark writes do not affect what it runs.
    """
    # A config's pages are named after the first argument of `benchmarks.run`.
    names = [Path(word).stem for word in sys.argv[:2] if not word.startswith("-")]
    pages = [f":(top,exclude)benchmarks/results/{name}*" for name in names]
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", *pages)
    return _git("describe", "--always", "--abbrev=10") + ("-dirty" if changed else "")


# Determined at the start, before the figures of a repeated benchmark change the working
# tree.
COMMIT = _commit()


def provenance() -> dict[str, Any]:
    """Return the command, commit and machine of a result.

    Returns
    -------
    dict
        ``command``, ``commit`` (at the start), ``machine``, ``python``, ``torch`` and
        ``seconds`` since the start, which exclude the runs of earlier commands.
    """
    import torch

    script = Path(sys.argv[0])
    # The main module has a spec only if it was started with `-m`.
    as_module = sys.modules["__main__"].__spec__ is not None
    name = f"-m benchmarks.{script.stem}" if as_module else f"benchmarks/{script.name}"
    arguments = [*name.split(), *sys.argv[1:]]
    # Replace local paths, which should not be published.
    for i, argument in enumerate(arguments[:-1]):
        if argument in ("--data-dir", "--output", "--model", "--pfllib"):
            arguments[i + 1] = argument.removeprefix("--").partition("-")[0].upper()
    return {
        "command": shlex.join(["python", *arguments]),
        "commit": COMMIT,
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - BEGAN),
    }


def rounded(value: Any) -> Any:
    """Round floats to 6 significant digits, which keeps files small."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return value


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table.

    Parameters
    ----------
    columns : sequence of str
        Headings.
    rows : sequence of sequences
        Cells.

    Returns
    -------
    str
        The table.
    """
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write(name: str, title: str, body: str, data: dict[str, Any]) -> None:
    """Write ``results/<name>.md`` and ``results/<name>.json`` and print the former.

    Parameters
    ----------
    name : str
        File name without suffix.
    title : str
        Heading.
    body : str
        Markdown below the provenance.
    data : dict
        The numbers. ``seconds``, if present, is the total time of all runs, including
        those of earlier commands.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    about = provenance()
    took = f"{about['seconds']} s"
    if "seconds" in data:
        took = f"{data['seconds']:.0f} s in its runs"
    text = (
        f"# {title}\n\n`{about['command']}` at commit {about['commit']}; "
        f"{about['machine']}, Python {about['python']}, torch {about['torch']}; "
        f"{took}\n\n" + body
    )
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    content = {"about": about, **data}
    (RESULTS / f"{name}.json").write_text(
        json.dumps(rounded(content), separators=(",", ":")) + "\n", encoding="utf-8"
    )
    print(text)
