"""Fixtures and setup of all tests: one thread, a separate cache, no Flower run."""

# ruff: noqa: E402 - the garbage collector is disabled before the imports.
import gc

# Disabled until all tests are collected: imported objects are not garbage, and every
# collection would scan more of them.
gc.disable()

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings as hypothesis_settings
from torch import nn

from flwr_frl.common.arrays import enter_run
from flwr_frl.results.comparison import write_figures
from flwr_frl.task.models import MODELS
from flwr_frl.task.training import local_training as calls

# Time limits for single examples only measure how busy the machine is.
hypothesis_settings.register_profile("tests", deadline=None)
hypothesis_settings.load_profile("tests")

# Numbers that make the names of modules written by tests unique
NUMBERS = count()
# Functions that draw figures. Tests replace them, since a figure takes longer than a
# few rounds.
FIGURES = {"flwr_frl.results.comparison.write_figures": write_figures}


# Test files that start federations and mostly wait, the longest first
LONGEST = (
    "test_devices.py",
    "test_chaos.py",
    "test_guide_to_tasks.py",
    "test_partitions.py",
    "test_flwr_run.py",
    "test_arrivals.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--gpu``, with which only ``tests/strategies/test_gpu.py`` can run."""
    parser.addoption("--gpu", action="store_true", help="do not hide CUDA GPUs")


def pytest_configure(config: pytest.Config) -> None:
    """Hide CUDA GPUs, as the expected values are those of a CPU."""
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest end-to-end tests first.

    They mostly wait, so other workers can compute meanwhile, and no worker is left with
    a long file at the end.
    """
    ranks = {f"e2e/{name}": rank for rank, name in enumerate(LONGEST, -len(LONGEST))}
    items.sort(key=lambda item: ranks.get("/".join(item.path.parts[-2:]), 0))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Enable garbage collection after test collection, without imported objects."""
    try:
        return (yield)
    finally:
        gc.freeze()
        # Full collections also scan what tests import; they run 20 times less often.
        gc.set_threshold(700, 10, 200)
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.set_num_threads(1)
    enter_run()
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise, threads of one process spin while threads that they wait for have
        # no core: 20 s of work took 300 s of CPU time.
        patch.setenv("OMP_NUM_THREADS", "1")
        # Without bytecode files, each process of a device compiles all of the code.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        # Tests start with an empty cache, except for matplotlib's list of fonts, which
        # is slow to build.
        cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
        fonts = Path(cache).expanduser() / "matplotlib"
        patch.setenv("MPLCONFIGDIR", os.environ.get("MPLCONFIGDIR", str(fonts)))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # Tests need not survive a power failure, so files are not flushed to the disk.
        patch.setattr(os, "fsync", lambda descriptor: None)
        for place in FIGURES:
            patch.setattr(place, lambda *given, **named: None)
        yield


@pytest.fixture
def write_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], str]:
    """Return a function that writes a custom module and returns its import name."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def write(name: str, text: str) -> str:
        # A unique name, as objects that are cached by name outlive their test
        name = f"{name}_{next(NUMBERS)}"
        (folder / f"{name}.py").write_text(text)
        return name

    return write


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs draw their figures, as they do outside of tests."""
    for place, function in FIGURES.items():
        monkeypatch.setattr(place, function)


@pytest.fixture
def nobody_reads() -> Callable[[], AbstractContextManager[object]]:
    """Replace standard output by a pipe without a reader, as after `| head` exits."""

    @contextmanager
    def replaced() -> Iterator[None]:
        read, write = os.pipe()
        os.close(read)
        # Closing the file writes the rest of its buffer.
        with os.fdopen(write, "w") as output, redirect_stdout(output):
            yield

    return replaced


@pytest.fixture
def softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the model ``softmax``: logistic regression that does not start at zero.

    Untrained entries would otherwise be equal, and the choice of the k largest
    arbitrary.
    """

    def build(shape, num_classes):
        linear = nn.Linear(int(np.prod(shape)), num_classes)
        return [{"flatten": nn.Flatten()}, {"fc1": linear}]

    monkeypatch.setitem(MODELS, "softmax", build)


@pytest.fixture
def batched_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Sizes of the batched calls, by kind of call."""
    counts: dict[str, list[int]] = {}
    # The argument whose length is the number of clients
    for kind, method, place in (
        (calls.TrainCall, "on_rows", 2),
        (calls.GradientCall, "together", 0),
    ):
        original = getattr(kind, method)
        sizes = counts.setdefault(kind.__name__, [])

        def counted(*arguments, original=original, sizes=sizes, place=place):
            sizes.append(len(arguments[place]))
            return original(*arguments)

        wrapped = counted if place else staticmethod(counted)
        monkeypatch.setattr(kind, method, wrapped)
    return counts
