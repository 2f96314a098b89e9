"""Clients of one process as rows of matrices: one call of `Client.update` for all.

Most algorithms only train parts of their model, and compute with the arrays of the
model and those that were received or saved. `Rows` makes each such step for all
clients at once; `torch.vmap` ensures that it means the same as for one client. Clients
of other algorithms are answered one by one.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from logging import DEBUG, getLogger
from math import nan, prod
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from flwr.app import Context, Message
from torch import Tensor

from flwr_frl.clients.base import Client, Config
from flwr_frl.clients.device.codec import (
    check_config,
    matrix_of,
    pack,
    pack_evaluation,
    unpack,
)
from flwr_frl.clients.device.evaluation import class_mask, evaluate_clients
from flwr_frl.clients.device.groups import (
    REPRESENTATION,
    Tensors,
    to_arrays,
    under,
    zeros_like,
)
from flwr_frl.clients.device.setup import SIMULATED, Setup, build_client, personal_state
from flwr_frl.clients.device.state import StoredArrays
from flwr_frl.common import messages as keys
from flwr_frl.common.arrays import ReplyRows, Request, RowArrays, RowReply, finite_rows
from flwr_frl.common.compression import NONE
from flwr_frl.common.errors import TrainingDivergedError, reason_of
from flwr_frl.common.run_cache import run_object
from flwr_frl.common.settings import load
from flwr_frl.task.base import Task
from flwr_frl.task.devices import CPU, RngContext, client_seed
from flwr_frl.task.examples import EVALUATION_BATCH, ExampleSet
from flwr_frl.task.models import Part
from flwr_frl.task.training.cohort import CohortLimit, RefusedKeys
from flwr_frl.task.training.local_training import (
    FEWEST,
    TrainCall,
    features_of,
    features_of_all,
)
from flwr_frl.task.training.sgd import freeze, gradient_weight, trainable_examples
from flwr_frl.task.training.stacked import tensors_of

# Methods that a class must inherit to train, or to test, as rows. Groups of parameters
# may be constants, but not depend on the client.
STEPS = "fit", "train", "_receive", "_reply", "_takes"
TESTS = "evaluate", "deployed_model", "_test", "_receive"
GROUPS = "shared", "personal", "sent"
# Maximum number of input values in a batch of tests; larger batches are not faster.
LARGEST = 2**16


class CannotBeRowsError(Exception):
    """An algorithm's step cannot be made for several clients at once."""


class Asked(NamedTuple):
    """A message, with the settings of its client and the context of its node."""

    setup: Setup
    request: Request
    context: Context


def fit_rows(
    asked: Sequence[Asked], size: int, only_if_faster: bool
) -> dict[int, Message]:
    """Answer training messages as rows of matrices, as far as this is possible.

    Parameters
    ----------
    asked : sequence of Asked
        The messages.
    size, only_if_faster
        As of `flwr_frl.task.training.cohort.each_together`.

    Returns
    -------
    dict of int to Message
        Replies by the positions of their messages. The other messages must be answered
        one by one, for example those of clients whose training has diverged. Their
        clients' states are unchanged.
    """
    refused, limit = run_object(RefusedKeys), run_object(CohortLimit)
    kind, replies = asked[0].setup.kind, dict[int, Message]()
    rows: Any = load(kind._rows, "rows of clients")
    alike = list(rows.joining(asked).items())
    while len(alike) >= 2 and (rows, kind) not in refused:
        most = min(size, limit.most, len(alike))
        chunk = dict(alike[:most] if rows.in_chunks else alike)
        try:
            answers = rows([*chunk.values()], only_if_faster).fit()
        # One by one, each client reports its own error.
        except TrainingDivergedError:
            break
        # Code of algorithms raises any exception.
        except Exception as error:
            if limit.halve(most, error):
                continue
            text = "%s: clients are answered one by one: %s"
            getLogger("task").log(rows.level, text, kind.__name__, reason_of(error))
            if len(chunk) >= rows.least:
                refused.add((rows, kind))
            break
        del alike[: len(chunk)]
        answered = zip(chunk, answers, strict=True)
        replies |= {i: answer for i, answer in answered if answer is not None}
    return replies


def evaluate_rows(asked: Sequence[Asked]) -> dict[int, Message]:
    """Answer evaluations of the same model, with the examples of clients in one batch.

    A client without a saved state tests the model that it has received. In a large
    population most clients have never trained, so they have no state.

    Parameters
    ----------
    asked : sequence of Asked
        The messages.

    Returns
    -------
    dict of int to Message
        As of `fit_rows`.
    """
    replies: dict[int, Message] = {}
    setup = asked[0].setup
    lost = keys.ACKNOWLEDGED_ROUND if setup.kind.personal else ""
    # A client whose state is lost reports it.
    nodes = {
        i: each
        for i, each in _alike(asked, TESTS).items()
        if not each.context.state and not each.request.config.get(lost)
    }
    # A state may be on disk, and a head may be trained before the test.
    trains = getattr(setup.algorithm, "head_epochs_before_test", 0)
    if setup.states or trains or not nodes:
        return replies
    # After an error, clients are evaluated one by one, and each reports its own.
    with contextlib.suppress(Exception):
        first = next(iter(nodes.values()))
        config = check_config(first.request.config)
        client = build_client(first.context, first.setup, config)
        task = client.task
        if task.metrics or not client.model.is_layered:
            return replies
        client._receive(unpack(first.request.records, client), config)
        indices = {i: each.setup.partition for i, each in nodes.items()}
        for batch in _batches(task, indices):
            results = evaluate_clients(task, [indices[i] for i in batch], client.model)
            for i, result in zip(batch, results, strict=True):
                replies[i] = pack_evaluation(nodes[i].request, client, result)
    return replies


def _alike(asked: Sequence[Asked], inherited: Sequence[str]) -> dict[int, Asked]:
    """Return messages to simulated clients that contain the same, by their positions.

    The clients' class must inherit the methods of these names from `Client`.
    """
    setup, request, _ = asked[0]
    kind, first = setup.kind, request.records
    # The initial values of personal arrays may depend on the received ones.
    may_differ = inherited is STEPS and not kind.personal
    records = first.keys() - ({keys.HEAD} if may_differ else set())
    # Two messages to one client change the same state.
    distinct = len({id(each.context) for each in asked}) == len(asked)
    plain = all(
        getattr(kind, name) is getattr(Client, name)
        or (name in GROUPS and isinstance(getattr(kind, name), tuple))
        for name in (*GROUPS, *inherited)
    )
    if records != {keys.ARRAYS} or not distinct or not plain:
        return {}
    if setup.device.dp_noise or setup.device.upload_compressor != NONE:
        return {}
    check_config(request.config)
    of_round, of_node = request.of_round, _common(request.of_node)

    def fits(each: Asked) -> bool:
        content = each.request.records
        return (
            content.keys() == first.keys()
            and (may_differ or content[keys.ARRAYS] is first[keys.ARRAYS])
            and each.context.node_config.keys() == SIMULATED
            and each.setup.run is setup.run
            and (each.request.of_round is of_round or each.request.of_round == of_round)
            and _common(each.request.of_node) == of_node
        )

    return {i: each for i, each in enumerate(asked) if fits(each)}


def _common(config: Config) -> Config:
    """Return the entries of a config that are the same for all clients of a round."""
    return {name: v for name, v in config.items() if name not in keys.OF_A_CLIENT}


def _batches(task: Task, indices: Mapping[int, int]) -> Iterator[list[int]]:
    """Yield the positions of clients whose test examples form one batch."""
    batch: list[int] = []
    numbers = 0
    for position, index in indices.items():
        examples = task.resident("test", index)
        if not 0 < len(examples) <= EVALUATION_BATCH:
            continue
        more = len(examples) * prod(examples.inputs.shape[1:])
        if batch and numbers + more > LARGEST:
            yield batch
            batch, numbers = [], 0
        batch.append(position)
        numbers += more
    if batch:
        yield batch


class _OnRows(torch.autograd.Function):
    """Apply a function of stacked tensors within `torch.vmap`."""

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        """Raise: without `vmap`, the inputs have no rows."""
        raise CannotBeRowsError

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Do nothing: there are no gradients."""

    @staticmethod
    def vmap(info: Any, dims: Any, function: Any, *tensors: Tensor) -> Any:
        """Return the function's result on tensors with a row for each client."""
        rows = [
            tensor.expand(info.batch_size, *tensor.shape)
            if dim is None
            else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, dims[1:], strict=True)
        ]
        return function(rows), 0


class RowModel:
    """The arrays of the clients' models, as `Client.update` uses them."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def state_dict(self) -> Tensors:
        """Return the arrays, not copies."""
        return self.tensors

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite the arrays."""
        for name, tensor in self.tensors.items():
            tensor.copy_(state[name])


class Rows:
    """Several clients of one class, as one client in `Client.update`.

    It has those attributes of a client that mean the same for several, and the
    algorithm's own methods. Others raise an exception, so that nothing of one client is
    used for all.

    Parameters
    ----------
    asked : sequence of Asked
        Their messages.
    only_if_faster : bool
        Whether to refuse models that are faster one by one.
    """

    # Whether chunks of clients are answered in turn, the level of the line that says
    # why clients are answered one by one, and the fewest of which it is final.
    in_chunks, level, least = True, DEBUG, FEWEST

    @staticmethod
    def joining(asked: Sequence[Asked]) -> dict[int, Asked]:
        """Return the messages that can be answered together, by their positions."""
        return _alike(asked, STEPS)

    def __init__(self, asked: Sequence[Asked], only_if_faster: bool) -> None:
        setup, request, context = asked[0]
        config = check_config(request.config)
        self._asked, self._only_if_faster = asked, only_if_faster
        self._client = client = build_client(context, setup, config, trains=True)
        # Before the models are copied: the copies may not fit into the memory.
        if only_if_faster and client._device == CPU and client.model.is_large:
            raise CannotBeRowsError("their model is too large")
        self.settings = client.settings
        client._receive(unpack(request.records, client), config)
        client._make = self._make
        self._kind = type(client)
        self._own = self._differing()
        self.received, self.metrics = client.received, client.metrics
        self.config = type(config)(_common(config))
        self._streams, self._examples, self._states = [], [], []
        run, server_round = int(setup.run["seed"]), config.get(keys.SERVER_ROUND, 0)
        for each in asked:
            index = each.setup.partition
            first = client_seed(run, each.setup.name, server_round)
            self._streams.append(RngContext(first))
            self._examples.append(client.task.resident("train", index))
            if client.personal:
                state = personal_state(each.context, each.setup, each.request.config)
                self._states.append(state)
        self.saved: Tensors = {}
        loaded = [state.load(client._shapes) or {} for state in self._states]
        for name, value in client._initial_arrays(client.personal).items():
            initial = value.numpy(force=True)
            rows = np.stack([arrays.get(name, initial) for arrays in loaded])
            self.saved[name] = torch.from_numpy(rows).to(client._device)
        # Stacked values of the models' arrays, in their memory format, and the
        # names of those that are still the same for all clients.
        self._tensors = {
            name: tensor.detach().expand(len(asked), *tensor.shape).clone()
            for name, tensor in client.model.tensors.items()
        }
        different = self.saved | self._own
        for name in self._tensors.keys() & different.keys():
            self._tensors[name].copy_(different[name])
        self._equal = self._tensors.keys() - different.keys()
        self.model = RowModel(self._tensors)
        # Clients that are answered one by one, as they report a lost state or an error.
        self._failed = {i for i, state in enumerate(self._states) if state.unused}
        pairs = zip(self._states, (each.request.config for each in asked), strict=False)
        self._in_mean = torch.tensor(
            [s.round > 0 and bool(of.get(keys.IN_MEAN, True)) for s, of in pairs]
        )

    @property  # type: ignore[misc]
    def __class__(self) -> type[Client]:  # type: ignore[override]
        """The algorithm's class, so that ``super()`` finds its methods."""
        return self._kind

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the algorithm's class, but none of `Client`."""
        owner = next((k for k in self._kind.__mro__ if name in vars(k)), Client)
        if issubclass(Client, owner):
            raise CannotBeRowsError(f"its update uses {name!r}")
        value = inspect.getattr_static(self._kind, name)
        return value.__get__(self, self._kind) if hasattr(value, "__get__") else value

    def _differing(self) -> Tensors:
        """Return stacked values of received arrays that differ between the clients."""
        client, differing = self._client, dict[str, Tensor]()
        contents = [each.request.records for each in self._asked]
        records = {id(content[keys.ARRAYS]) for content in contents}
        if keys.HEAD not in contents[0] and len(records) == 1:
            return differing
        names = client._array_names(client.shared)
        lists = [unpack(records, client) for records in contents]
        for name, values in zip(names, zip(*lists, strict=True), strict=True):
            if any(value is not values[0] for value in values):
                rows = torch.from_numpy(np.stack(values)).to(client._device)
                differing[name] = rows.to(client.received[name].dtype)
        return differing

    def train(
        self,
        part: Part,
        epochs: int,
        regularizer: Any = None,
        correction: Mapping[str, Tensor] | None = None,
        learning_rate: float | None = None,
    ) -> Any:
        """Train a part of all models, as `Client.train` does; return the losses."""
        terms = regularizer, correction, None, learning_rate
        return self._client.train(part, epochs, *terms)

    def _make(self, call: TrainCall) -> Any:
        """Make a call of the first client for all; return their losses."""
        if call.regularizer is not None and not is_dataclass(call.regularizer):
            raise CannotBeRowsError("its regularizer is no dataclass")
        constants, correction = tensors_of(call.regularizer), call.correction or {}

        def trained(rows: Sequence[Tensor]) -> Tensor:
            of_terms = list(rows[: len(constants)])
            more = dict(zip(correction, rows[len(constants) : -1], strict=True))
            return self._trained(call, of_terms, more)

        return self._on_rows(trained, *constants, *correction.values())

    def _on_rows(self, function: Callable[..., Any], *tensors: Tensor) -> Any:
        # At least one of the tensors must have rows.
        any_row = next(iter(self.model.tensors.values()))
        return _OnRows.apply(function, *tensors, any_row)

    def _row_of(self, values: Tensor) -> Tensor:
        """Return the value of each client as one value."""
        return cast(Tensor, self._on_rows(lambda _: values.to(self._client._device)))

    def _gradient_weight(self, epochs: int) -> Tensor:
        model, sgd = self._client.model, self.settings
        sets = {len(each): each for each in self._examples}
        of_size = {n: gradient_weight(model, e, epochs, sgd) for n, e in sets.items()}
        weights = [of_size[len(each)] for each in self._examples]
        return self._row_of(torch.tensor(weights))

    def _class_mask(self) -> Tensor:
        task = self._client.task
        head = self._client.model.linear_head(self._kind.__name__)
        masks = [class_mask(task, each.setup.partition, head) for each in self._asked]
        return self._row_of(torch.stack(masks))

    def _counted(self, group: str, otherwise: Tensors | None = None) -> Tensors:
        saved, counts = under(group, self.saved), self._row_of(self._in_mean)
        others = zeros_like(saved) if otherwise is None else otherwise
        return {n: torch.where(counts, v, others[n]) for n, v in saved.items()}

    def _trained(
        self, call: TrainCall, constants: list[Tensor], correction: Tensors
    ) -> Tensor:
        """Train all models, and return their losses."""
        fewest = call.fewest if self._only_if_faster else 2
        if call.key is None or fewest is None or len(self._examples) < fewest:
            raise CannotBeRowsError("they are too few, or their model is too large")
        model, sets = call.model, self._sets_like(call.examples)
        freeze(model, call.part)
        if call.epochs:
            sets = [trainable_examples(model, each, call.sgd) for each in sets]
        if call.has_features:
            sets = list(self._features(call, sets))
        rows = call.on_rows(self._tensors, sets, constants, correction, self._streams)
        prefix = "" if call.part == "all" else f"{call.part}."
        self._equal = {name for name in self._equal if not name.startswith(prefix)}
        self._failed |= {
            i for i, loss in enumerate(rows) if isinstance(loss, Exception)
        }
        losses = [nan if isinstance(loss, Exception) else loss for loss in rows]
        return torch.tensor(losses, dtype=torch.float64)

    def _sets_like(self, first: ExampleSet) -> list[ExampleSet]:
        """Return the clients' examples as those of the first client are used."""
        sets, form, device = list[ExampleSet](), first.form, self._client._device
        for examples in self._examples:
            if examples.augment and not first.augment:
                examples = examples.without_augmentation()
            if examples.form != form:
                raise CannotBeRowsError("their examples differ in form")
            sets.append(examples.on(device))
        return sets

    @torch.no_grad()
    def _features(
        self, call: TrainCall, sets: Sequence[ExampleSet]
    ) -> Iterator[ExampleSet]:
        """Yield the features of each client's examples, by its own representation."""
        tensors = call.model.tensors
        names = {name for name in tensors if name.startswith(REPRESENTATION)}
        different = names - self._equal
        for name in names - different:
            tensors[name].copy_(self._tensors[name][0])
        if not different:
            together = features_of_all(call.model, sets, call.sgd)
            if together is not None:
                yield from together
                return
        for i, examples in enumerate(sets):
            for name in different:
                tensors[name].copy_(self._tensors[name][i])
            yield features_of(call.model, examples, call.sgd)

    def fit(self) -> list[Message | None]:
        """Answer the messages, as `Client.fit` does; None for clients that fail."""
        loss, sent, saved, metrics = self._updated()
        kept = {name: tensor.numpy(force=True) for name, tensor in saved.items()}
        valid = finite_rows(*kept.values()) if kept else []
        self._failed |= {i for i in range(len(self._states)) if not valid[i]}
        # No state is changed before all replies exist.
        replies = self._replies(sent, {"train-loss": loss, **metrics})
        server_round = int(self.config[keys.SERVER_ROUND])
        for i, state in enumerate(self._states):
            if i not in self._failed:
                # Copies, so that no client keeps the arrays of all others in memory.
                arrays = {name: rows[i, ...].copy() for name, rows in kept.items()}
                state.save(arrays, server_round, StoredArrays(arrays))
        return replies

    def _updated(self) -> tuple[Tensor, Tensors, Tensors, Tensors]:
        """Return the clients' losses, arrays to send and to save, and metrics."""
        client = self._client
        sent_names = client._array_names(client.sent)
        saved_names = client._array_names(client.personal)
        number = partial(torch.as_tensor, dtype=torch.float64)
        common = client.received

        def update(tensors: Tensors, saved: Tensors, own: Tensors) -> Any:
            self.model, self.saved = RowModel(tensors), saved
            # Proximal terms are those of `client`.
            client.received = self.received = {**common, **own}
            result = self._kind.update(cast(Client, self))
            loss, arrays = result if isinstance(result, tuple) else (result, tensors)
            kept = {**self.saved, **tensors}
            return (
                number(loss),
                {name: arrays[name] for name in sent_names},
                {name: kept[name] for name in saved_names},
                {n: number(value) for n, value in self.metrics.items()},
            )

        results: Any = torch.vmap(update)(self._tensors, self.saved, self._own)
        client.received = common
        client._check_changes()
        return tuple(results)

    def _replies(self, sent: Tensors, metrics: Tensors) -> list[Message | None]:
        """Return the replies; None for clients that have failed."""
        server_round = float(self.config[keys.SERVER_ROUND])
        columns: dict[str, list[int | float]] = {
            keys.NUM_EXAMPLES: [len(each) for each in self._examples],
            **{name: column.tolist() for name, column in metrics.items()},
            keys.SERVER_ROUND: [server_round] * len(self._asked),
        }
        # Clients that have lost their states are in `_failed`.
        self._client._state.unused = ""
        arrays = to_arrays(sent)
        content = self._asked[0].request.records
        matrix = matrix_of(arrays, content, self._client)
        if matrix is not None:
            rows = ReplyRows(matrix, columns)
            return [
                None
                if i in self._failed
                else RowReply(each.context.node_id, RowArrays(rows, i), each.request)
                for i, each in enumerate(self._asked)
            ]
        for array in arrays.values():
            # Parts of arrays that do not change need not be copied.
            array.flags.writeable = False
        counts = columns.pop(keys.NUM_EXAMPLES)

        def reply(i: int, message: Message) -> Message:
            of_client: Config = {name: each[i] for name, each in columns.items()}
            parts = [array[i, ...] for array in arrays.values()]
            return pack(message, self._client, (parts, int(counts[i]), of_client))

        return [
            None if i in self._failed else reply(i, each.request)
            for i, each in enumerate(self._asked)
        ]
