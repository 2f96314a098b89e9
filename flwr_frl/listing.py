"""The list of algorithms, tasks and models, which needs neither PyTorch nor Flower."""

from flwr_frl.strategies.report.terminal import console
from flwr_frl.strategies.table import ALGORITHMS
from flwr_frl.task.names import MODELS, TASKS


def show_list() -> None:
    """Print the names of all algorithms, tasks and models, one per line."""
    lines = [f"algorithm  {n:<24} {about}" for n, (_, about) in ALGORITHMS.items()]
    lines += [f"task       {name}" for name in TASKS]
    lines += [f"model      {name:<14} {about}" for name, about in MODELS.items()]
    lines += ["model      any classification model of torchvision"]
    console().out("\n".join(lines), highlight=False)
