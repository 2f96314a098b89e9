"""List, reproduce and check all tables and figures.

``python -m benchmarks.reproduce --list`` shows each with its page, command and time, or
with the reason why it has no page; ``NAME`` runs its command. ``--check`` exits with 1
if a number in the README or a guide differs from its page, or if a page is missing, has
no entry in ``reproduce.toml``, or was not made by a clean commit.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# For running this file without `-m`; Opacus also installs a package `benchmarks`.
sys.path.insert(0, str(ROOT))

from benchmarks.figures import PAGES, Data, dirty, read, wrong_figures  # noqa: E402
from benchmarks.run import CONFIGS  # noqa: E402
from benchmarks.run import read as runner  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A table or a figure, named after its page; see ``reproduce.toml``."""

    shows: str
    command: str = ""
    record: bool = False
    why: str = ""
    time: str = ""
    gpu: str = "unknown"


def entries() -> dict[str, Entry]:
    """Return the entries of ``reproduce.toml`` by name.

    The command of a page that has a config is that of `benchmarks.run`.
    """
    text = (Path(__file__).parent / "reproduce.toml").read_text(encoding="utf-8")
    given = tomllib.loads(text)
    for path in CONFIGS.glob("*.toml"):
        config = runner(path.stem)
        words = ["python -m benchmarks.run", path.stem, "--output OUTPUT"]
        words += [f"--{n} {word}" for word, n in FOLDERS.items() if n in config.needs]
        entry = given.setdefault(path.stem, {"shows": config.title})
        entry.setdefault("command", " ".join(words))
    return {name: Entry(**entry) for name, entry in given.items()}


def check(root: Path, all_entries: dict[str, Entry]) -> Iterator[str]:
    """Yield a line for each problem."""
    yield from wrong_figures(root)
    for name, entry in all_entries.items():
        if read(root, name) is None and not entry.why:
            yield f"{PAGES / name}.json is missing"
        yield from dirty(root, name)
    for path in sorted((root / PAGES).glob("*.md")):
        if path.stem not in all_entries:
            yield f"{PAGES / path.name} is not in benchmarks/reproduce.toml"


def command_of(entry: Entry, data: Data | None) -> str:
    """Return the command of an entry, or else that of its page, unless it is old."""
    if entry.command or entry.record:
        return entry.command
    return str(data["about"]["command"]) if data else ""


def seconds(data: Data) -> float:
    """Return the time of a page's runs, or else of the whole page."""
    return float(data.get("seconds") or data["about"].get("seconds", 0))


def duration(number: float) -> str:
    """Format a number of seconds."""
    if number < 100:
        return f"{number:.0f} s"
    return f"{number / 60:.0f} min" if number < 6000 else f"{number / 3600:.1f} h"


def show(root: Path, name: str, entry: Entry) -> str:
    """Return a description of an entry, in a few lines."""
    data = read(root, name)
    taken = seconds(data) if data else 0
    time = entry.time or (f"{duration(taken)} (its page)" if taken else "unknown")
    lines = [f"{name}: {entry.shows}"]
    if data:
        lines += [f"page: {PAGES / name}.md at {data['about']['commit']}"]
        if entry.record:
            lines += ["its script was removed; the page is a record of that commit"]
    elif entry.why:
        lines += [f"not here: {entry.why}"]
    if command := command_of(entry, data):
        lines += [f"command: {command}", f"time: {time}; on a GPU: {entry.gpu}"]
    return "\n    ".join(lines)


def run(name: str, command: str, given: dict[str, str | None]) -> int:
    """Run a command with its folders filled in; return its exit status."""
    words = shlex.split(command)
    for i, word in enumerate(words):
        if word in given:
            folder = given[word]
            if folder is None:
                print(f"{name} needs --{FOLDERS[word]}", file=sys.stderr)
                return 2
            if word != "OUTPUT" and not Path(folder).exists():
                print(f"--{FOLDERS[word]} {folder} does not exist", file=sys.stderr)
                return 2
            words[i] = folder
    if words[0] == "python":
        words[0] = sys.executable
    print(shlex.join(words), flush=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode


FOLDERS = {"DATA": "data-dir", "MODEL": "model", "OUTPUT": "output"}


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", help="what to reproduce")
    parser.add_argument("--list", action="store_true", help="show all, or NAME")
    parser.add_argument("--check", action="store_true", help="compare texts and pages")
    parser.add_argument("--data-dir", type=Path, help="value of DATA")
    parser.add_argument("--output", type=Path, help="OUTPUT; results/NAME by default")
    parser.add_argument("--model", type=Path, help="value of MODEL")
    arguments = parser.parse_args()
    known = entries()
    name = arguments.name
    if name is not None and name not in known:
        parser.error(f"{name} is not in the list that --list shows")
    if arguments.check and name is not None:
        parser.error("--check takes no NAME: it holds everything")
    if arguments.check:
        lines = list(check(ROOT, known))
        print(*lines, sep="\n", end="\n" if lines else "")
        return 1 if lines else 0
    if arguments.list:
        for each in [name] if name else known:
            print(show(ROOT, each, known[each]))
        return 0
    if name is None:
        parser.error("a NAME, --list or --check is needed")
    command = command_of(known[name], read(ROOT, name))
    if not command:
        why = known[name].why or "its script was removed"
        print(f"{name} has no command: {why}", file=sys.stderr)
        return 2
    output = arguments.output or Path("results") / name
    folders = {"DATA": arguments.data_dir, "OUTPUT": output, "MODEL": arguments.model}
    # The command runs in the repository's root.
    given = {k: str(v.resolve()) if v else None for k, v in folders.items()}
    return run(name, command, given)


if __name__ == "__main__":
    sys.exit(main())
