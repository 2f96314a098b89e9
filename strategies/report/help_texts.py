"""What ``python simulation.py --help`` says: flags, algorithms, and three commands."""

from flwr_frl.strategies.algorithms import ALGORITHMS

# What a flag means, besides its default.
MEANING = {
    "task": "what is learned: a name of --list, or package.module:function",
    "data-dir": "where the data is: a folder of images or arrays, torchvision's root",
    "clients": "how many clients the data is split over",
    "classes-per-client": "how many classes each client has",
    "rounds": "how many rounds there are",
    "fraction": "which share of the clients trains in a round",
    "seed": "fixes data, model and sampling: the same seed gives the same numbers",
    "device": "what clients train on: auto, cpu, cuda, cuda:N or mps",
    "output": "the folder of the results",
    "page": "show the results while it runs on http://127.0.0.1:PORT/; 0: do not",
}
ALGORITHM = "what to run and compare, one after the other; see below"
BACKEND = (
    "inline: in this process; ray: on all cores; auto (default): whichever is expected "
    "to end first"
)
RUN_CONFIG = "any other setting, spelled as in docs/settings.md, or a TOML file of them"
SEEDS = "run so many seeds, from --seed on, and report mean ± standard deviation"
JOBS = "run so many of them at a time, each in a process (default 1; --backend inline)"
GRID = "with `tune ALGORITHM …`: settings to choose from by validation accuracy"
COMMANDS = """three commands to begin with:
  python simulation.py
      FedAvg, FedRep and FLUTE on the bundled digits
  python simulation.py fedrep local --clients 10 --rounds 20 --page 8765
      two algorithms, watched at http://127.0.0.1:8765/ while they run
  python simulation.py fedrep --task image-folder --data-dir photos \\
      --run-config 'image-size=32 head-epochs=5'
      images of one's own, and settings that have no flag (docs/settings.md)
"""


def epilog() -> str:
    """Return what follows the flags: all algorithms, and three commands."""
    width = max(map(len, ALGORITHMS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in ALGORITHMS.items()]
    listed = "\n".join(lines)
    return f"algorithms, or package.module:Class of one's own:\n{listed}\n\n{COMMANDS}"


def meaning(flag: str, default: object) -> str:
    """Return what a flag means, with its default."""
    # argparse takes a percent sign for its own.
    said = f"default {default!r}" if default != "" else "none by default"
    return f"{MEANING[flag]} ({said})".replace("%", "%%")
