"""Joint steps that are captured once as a graph, and replayed.

A GPU executes a joint step of small models in a fraction of the time in which Python
launches its kernels. A CUDA graph launches all of them at once, on the same tensors
each time. Results are those of the step itself: they are compared when a graph is
captured, and if they differ, the step goes on without one.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from logging import getLogger
from typing import Any, cast

import torch
from torch import Tensor

from flwr_frl.common.errors import error_line
from flwr_frl.common.run_cache import run_cache
from flwr_frl.task.training.stacked import (
    Objective,
    StackedBatch,
    StackedOptimizer,
    steps_at_once,
)

# Calls before the capture, in which libraries allocate their workspaces.
WARM_UP = 2
# Most kinds of steps whose tensors and graphs are kept; the least recently used go.
MOST = 16
Step = Callable[[], None]
Function = Callable[..., Sequence[Tensor]]
log = getLogger("task")


def python_graph(step: Step) -> Step:
    """Return a stand-in for `cuda_graph` on any device: the step itself.

    Parameters
    ----------
    step : callable
        Reads and changes tensors that stay in place.
    """
    return step


@run_cache(maxsize=1)
def _shared() -> tuple[Any, Any]:
    """Return the stream on which graphs are captured, and the first of a run's graphs.

    All graphs share the memory of the first one, which it keeps: they leave no results
    in the memory of their intermediate values, and run one at a time. Libraries keep a
    workspace for each stream.
    """
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    first = torch.cuda.CUDAGraph()
    with torch.cuda.graph(first, stream=stream):
        torch.zeros(1, device="cuda")
    return stream, first


def cuda_graph(step: Step) -> Step:
    """Return a function that replays a step, captured as a CUDA graph."""
    (stream, first), graph = _shared(), torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    try:
        # This context restores the stream, which a failed capture does not.
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
            # After a failure, torch's allocator needs the graph, and refuses others.
            _failed.append(graph)
            with torch.cuda.graph(graph, first.pool(), stream):
                step()
            _failed.clear()
    finally:
        current.wait_stream(stream)
    return graph.replay


# How steps are captured on each type of device, and graphs whose captures failed.
GRAPHS: dict[str, Callable[[Step], Step]] = {"cuda": cuda_graph}
_failed: list[Any] = []


def are_captured(device: torch.device) -> bool:
    """Return True if steps are captured on a device."""
    return device.type in GRAPHS and not _failed


class CapturedStep:
    """A step that is captured when it is first made, and replayed from then on.

    Parameters
    ----------
    step : callable
        Reads and changes tensors that stay in place.
    changed : sequence of Tensor
        All tensors that it changes and whose values matter.
    """

    def __init__(self, step: Step, changed: Sequence[Tensor]) -> None:
        self.step, self.changed = step, changed
        self.replay: Step | None = None
        # True if the next call compares the graph with the step.
        self.is_due = True

    def __call__(self) -> None:
        """Make the step."""
        if self.is_due:
            self._compare()
        else:
            (self.replay or self.step)()

    def _compare(self) -> None:
        """Make the step with and without a graph, which is dropped if they differ."""
        self.is_due = False
        before = [tensor.clone() for tensor in self.changed]
        self.step()
        expected, reason = [tensor.clone() for tensor in self.changed], ""
        try:
            if self.replay is None:
                _copy(before, self.changed)
                self.replay = GRAPHS[before[0].device.type](self.step)
            _copy(before, self.changed)
            self.replay()
            if not all(map(_equal, self.changed, expected)):
                reason = "its replay gives other results"
        # CUDA and users' modules raise exceptions of many types.
        except Exception as error:
            # An error in a capture causes another one at its end.
            reason = error_line(error.__context__ or error)[:200]
        if reason:
            self.replay = None
            _copy(expected, self.changed)
            log.warning("a training step is not captured as a graph: %s", reason)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


class CapturedTraining:
    """A `StackedOptimizer` on tensors that stay in place, whose steps are captured.

    Steps of all models are captured, one for each form of their batches. Steps of some
    of the models, whose batches are left at the end of an epoch, are not.

    Parameters
    ----------
    like : StackedOptimizer
        Its tensors are copied.
    """

    def __init__(self, like: StackedOptimizer) -> None:
        self.training = replace(
            like,
            state={name: tensor.clone() for name, tensor in like.state.items()},
            constants=[tensor.clone() for tensor in like.constants],
            correction={name: t.clone() for name, t in like.correction.items()},
        )
        self.state = self.training.state
        # Graphs may read tensors of its modules.
        self._first = like.objective
        self._steps: dict[Hashable, Steps] = {}

    def load(self, like: StackedOptimizer) -> None:
        """Start with another optimiser's tensors, which have the same form."""
        _copy(like.given, self.training.given)
        for moment in self.training.all_moments:
            moment.zero_()
        self.training.objective = like.objective
        # Code of a user may compute something else in this call.
        for each in self._steps.values():
            each.step.is_due = bool(each.step.replay) and not self._first.is_known

    def run(self, batches: StackedBatch, sums: Tensor) -> None:
        """Make successive steps; see `StackedOptimizer.run`."""
        if len(batches.tensors[0][0]) < len(sums[0]):
            self.training.run(batches, sums)
            return
        form = tuple(_form(tensor[0]) for tensor in batches.tensors)
        if form not in self._steps:
            self._steps[form] = Steps(self.training, batches)
        self._steps[form].run(batches, sums)


class Steps:
    """Steps with batches of one form, which a counter on the device selects.

    Parameters
    ----------
    training : StackedOptimizer
        Makes the steps.
    batches : StackedBatch
        The batches of some steps of all models.
    """

    def __init__(self, training: StackedOptimizer, batches: StackedBatch) -> None:
        x = batches.tensors[0]
        most = steps_at_once(x[0].numel(), x.device)
        self.tensors = [_rows(tensor, most) for tensor in batches.tensors]
        self.counter = torch.zeros(1, dtype=torch.int64, device=x.device)
        self.sums = torch.zeros(2, x.shape[1], device=x.device)
        step = partial(_step, training, self.tensors, self.counter, self.sums)
        changed = [*training.state.values(), *training.all_moments]
        self.step = CapturedStep(step, [*changed, self.counter, self.sums])

    def run(self, batches: StackedBatch, sums: Tensor) -> None:
        """Make the steps; see `StackedOptimizer.run`."""
        for tensor, values in zip(self.tensors, batches.tensors, strict=True):
            tensor[: len(values)].copy_(values)
        self.counter.zero_()
        self.sums.copy_(sums)
        for _ in batches.tensors[0]:
            self.step()
        sums.copy_(self.sums)


def _step(
    training: StackedOptimizer, tensors: Sequence[Tensor], counter: Tensor, sums: Tensor
) -> None:
    """Make the step that the counter selects, and advance the counter."""
    selected = tuple(_selected(tensor, counter) for tensor in tensors)
    batch = StackedBatch(selected, slice(None))
    sums[0] += training.step(batch) * batch.counts
    sums[1] += batch.counts
    # Calls before a capture may go beyond the last row.
    counter.add_(1).remainder_(len(tensors[0]))


def _selected(tensor: Tensor, counter: Tensor) -> Tensor:
    """Return the row that a counter selects, in the memory format of a row."""
    row = tensor[0]
    memory = tensor.as_strided((len(tensor), row.numel()), (row.numel(), 1))
    return memory.index_select(0, counter).as_strided(row.shape, row.stride())


class CapturedFunction:
    """A function of tensors on copies that stay in place, whose calls are captured.

    Parameters
    ----------
    function : callable
        Returns new tensors.
    arguments : sequence of Tensor
        Arguments of the form of all calls.
    """

    def __init__(self, function: Function, arguments: Sequence[Tensor]) -> None:
        self.arguments = [tensor.clone() for tensor in arguments]
        self.results = [torch.empty_like(r) for r in function(*self.arguments)]
        step = partial(_call, function, self.arguments, self.results)
        self.step = CapturedStep(step, self.results)

    def __call__(self, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the results, which the next call overwrites."""
        _copy(arguments, self.arguments)
        self.step()
        return self.results


def _call(
    function: Function, arguments: Sequence[Tensor], results: Sequence[Tensor]
) -> None:
    _copy(function(*arguments), results)


def _copy(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def called(
    objective: Objective, function: Function, arguments: Sequence[Tensor], key: Hashable
) -> Sequence[Tensor]:
    """Return the results of a function, captured if it is possible on the device.

    Parameters
    ----------
    objective : Objective
        Computed by the function.
    function, arguments
        As of `CapturedFunction`.
    key : Hashable
        Equal for functions that compute the same.

    Returns
    -------
    sequence of Tensor
        The results, which the next call overwrites.
    """
    # Code of a user would be compared in each call, of which none would be faster.
    if not (are_captured(arguments[0].device) and objective.is_known):
        return function(*arguments)
    kept = _kept((key, *map(_form, arguments)))
    if not kept:
        kept.append(CapturedFunction(function, arguments))
    return cast(CapturedFunction, kept[0])(arguments)


def _form(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype


def _rows(tensor: Tensor, count: int) -> Tensor:
    """Return rows of zeros in the memory format of a dense tensor's rows."""
    row = tensor[0]
    shape, strides = (count, *row.shape), (row.numel(), *row.stride())
    rows = torch.empty_strided(shape, strides, dtype=row.dtype, device=row.device)
    return rows.zero_()


@run_cache(maxsize=MOST)
def _kept(key: Hashable) -> list[Any]:
    """Return a list with room for the optimiser or the function of a key."""
    return []


def captured(
    training: StackedOptimizer, key: Hashable
) -> StackedOptimizer | CapturedTraining:
    """Return the optimiser with captured steps, if they exist on its device.

    Parameters
    ----------
    training : StackedOptimizer
        The optimiser, before its first step.
    key : Hashable
        Equal for optimisers whose steps are the same function of their tensors and
        their hyper-parameters.
    """
    given = training.given
    if not are_captured(given[0].device):
        return training
    kept = _kept((key, *map(_form, given)))
    # A learning rate that changes in each round replaces the graphs of the last one.
    if kept and kept[0].training.sgd == training.sgd:
        kept[0].load(training)
    else:
        kept[:] = [CapturedTraining(training)]
    return cast(CapturedTraining, kept[0])


def forget() -> None:
    """Release the graphs and tensors of the run."""
    _kept.cache_clear()  # type: ignore[attr-defined]
    _shared.cache_clear()  # type: ignore[attr-defined]
