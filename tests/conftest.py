"""Shared by all tests: one thread, a cache of their own, and Flower outside a run."""

# ruff: noqa: E402 - what is imported below is what the collector need not see.
import gc

# Until all tests are collected: what is imported is no garbage, and there is more of it
# to look through each time.
gc.disable()

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import settings as hypothesis_settings
from torch import nn

from flwr_frl.strategies.report.plot import plot
from flwr_frl.strategies.server import newcomers
from flwr_frl.task.models import MODELS

# Time limits of single examples only measure how busy the machine is.
hypothesis_settings.register_profile("tests", deadline=None)
hypothesis_settings.load_profile("tests")

# Of the modules that tests have written.
NUMBERS = count()
# What draws: a figure takes longer than a few rounds.
FIGURES = {
    "flwr_frl.strategies.report.comparison.plot": plot,
    "flwr_frl.strategies.server.newcomers.plot": newcomers.plot,
}


# Files that start federations, and mostly wait: the longest first.
LONGEST = (
    "test_devices.py",
    "test_guide_to_tasks.py",
    "test_chaos.py",
    "test_partitions.py",
    "test_guide_to_algorithms.py",
    "test_arrivals.py",
    "test_flwr_run.py",
)
END_TO_END = Path(__file__).parent / "e2e"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what waits, so that the others compute meanwhile, and longest first.

    No worker is then left with a long file in the end.
    """

    def rank(item: pytest.Item) -> int:
        if item.path.parent != END_TO_END:
            return len(LONGEST) + 1
        name = item.path.name
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """From now on there is garbage, which is looked for behind what was imported."""
    try:
        return (yield)
    finally:
        gc.freeze()
        # What tests import is looked through each time: a twentieth as often as usual.
        gc.set_threshold(700, 10, 200)
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.set_num_threads(1)
    # Flower refuses to build a Message outside of a run.
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 0
    with pytest.MonkeyPatch.context() as patch:
        # Threads of one process that wait for each other, spinning, while those of
        # another one have the core: 20 s of work took them 300 s of CPU.
        patch.setenv("OMP_NUM_THREADS", "1")
        # Each process of a device would compile all of the code for each message.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        # But matplotlib's list of fonts, which takes as long as many tests.
        cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
        fonts = Path(cache).expanduser() / "matplotlib"
        patch.setenv("MPLCONFIGDIR", os.environ.get("MPLCONFIGDIR", str(fonts)))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # Nobody pulls this process's plug: what is written need not be on the disk.
        patch.setattr(os, "fsync", lambda descriptor: None)
        for place in FIGURES:
            patch.setattr(place, lambda *given, **named: None)
        yield


@pytest.fixture
def write_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], str]:
    """Write an outsider's module; the name to import it by is returned."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def write(name: str, text: str) -> str:
        # Nothing that is remembered by name shall be another test's.
        name = f"{name}_{next(NUMBERS)}"
        (folder / f"{name}.py").write_text(text)
        return name

    return write


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw their figures, as they do outside of the tests."""
    for place, function in FIGURES.items():
        monkeypatch.setattr(place, function)


@pytest.fixture
def nobody_reads() -> Callable[[], AbstractContextManager[object]]:
    """Have standard output be a pipe whose reader has had enough, as `head` has."""

    @contextmanager
    def replaced() -> Iterator[None]:
        read, write = os.pipe()
        os.close(read)
        # It is closed in the end, which writes what is left.
        with os.fdopen(write, "w") as output, redirect_stdout(output):
            yield

    return replaced


@pytest.fixture
def softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model ``softmax``: logistic regression that does not begin at 0.

    Entries that nothing has moved yet would be equal, and which of them are the
    largest k would be nobody's business.
    """

    def build(shape, num_classes):
        linear = nn.Linear(int(np.prod(shape)), num_classes)
        return [[("flatten", nn.Flatten())], [("fc1", linear)]]

    monkeypatch.setitem(MODELS, "softmax", (build, ""))
