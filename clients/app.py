"""Translates between Flower's messages and calls of a NumPyClient."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from logging import ERROR
from typing import Any, cast

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common import log

from flwr_frl.clients.algorithms import client_setup
from flwr_frl.clients.base import Arrays, Client, Config
from flwr_frl.clients.device.account import PrivateTraining
from flwr_frl.clients.device.codec import check_config, pack, pack_evaluation, unpack
from flwr_frl.clients.device.rows import Asked, evaluate_rows, fit_rows
from flwr_frl.clients.device.secure import answer, check_message, check_rules, mask
from flwr_frl.clients.device.setup import (
    AUTO_ON_CPU,
    Setup,
    build_client,
    check_version,
    client_name,
    cohort_size,
    label_of,
    personal_state,
    properties_of,
)
from flwr_frl.clients.device.state import versions_in
from flwr_frl.common import messages as keys
from flwr_frl.common.arrays import UnreadMessage, fill, memory_record, request_of
from flwr_frl.common.errors import SettingsError, require
from flwr_frl.common.run_cache import begin_run, current_run
from flwr_frl.common.secure.messages import SECURE
from flwr_frl.common.settings import Resolved, Settings
from flwr_frl.task.devices import CPU, current, is_out_of_memory, out_of_memory, use
from flwr_frl.task.training.captured import are_captured
from flwr_frl.task.training.cohort import each_together


class App(ClientApp):
    """A Flower ClientApp in which clients of one process can train together.

    Parameters
    ----------
    run_config : mapping, optional
        Settings; ``cohort`` and ``device`` default to ``auto``.
    mods : sequence of Mod
        Flower's mods around training.
    """

    def __init__(self, run_config: Settings | None, mods: Sequence[Mod]) -> None:
        super().__init__()
        self.mods = mods
        self.run_config = run_config
        self.cohort = str((run_config or {}).get("cohort", "auto"))
        self.size = cohort_size(self.cohort)
        # Sent to workers, which may hold caches of an earlier command.
        self.command = current_run()

    def read_message(self, message: Message, context: Context) -> tuple[Setup, Config]:
        """Return a client's settings and its message's config; use its device."""
        config = check_config(request_of(message).config)
        # Only flwr-frl's ServerApp sends the name of the run.
        setup = client_setup(context, self.run_config, keys.RUN in config)
        if keys.COLUMNS in config:
            setup = setup._replace(columns=tuple(cast(Any, config[keys.COLUMNS])))
        # Reading the number takes less time than setting it again.
        if torch.get_num_threads() != setup.device.torch_threads:
            torch.set_num_threads(setup.device.torch_threads)
        use(setup.device.device)
        return setup, config

    def client(self, message: Message, context: Context) -> Client:
        """Return the client that a message is for."""
        return build_client(context, *self.read_message(message, context))

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message; running out of memory raises a one-line error."""
        begin_run(self.command)
        node = context.node_config
        if not {"client-name", "partition-id"} & node.keys():
            # Without a name, a node has the one that is registered in Flower.
            config = check_config(request_of(message).config)
            if keys.REGISTERED_NAME in config:
                node["client-name"] = str(config[keys.REGISTERED_NAME])
        try:
            reply = super().__call__(getattr(message, "plain", message), context)
            # A SuperNode needs Flower's own messages.
            is_ours = isinstance(message, UnreadMessage)
            return reply if is_ours else getattr(reply, "plain", reply)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            advice = "lower batch-size or cohort, or train on another device"
            raise out_of_memory(error, advice) from None

    def together(
        self,
        works: Sequence[Callable[[], Message]],
        messages: Sequence[Message],
        contexts: Sequence[Context],
    ) -> Iterator[Message]:
        """Answer messages of several clients together.

        Where possible, clients that train, the nodes of a graph and clients that test
        the same model are rows of matrices. All others run in
        `flwr_frl.task.training.cohort.each_together`.

        Parameters
        ----------
        works : sequence of callable
            Each answers one message on its own.
        messages, contexts : sequence
            The messages, and the contexts of their nodes.

        Returns
        -------
        iterator of Message
            The replies, in the order of the messages.
        """
        requests = [request_of(message) for message in messages]
        kinds = {each.template.metadata.message_type for each in requests}
        if self.cohort == "off" or not kinds & {
            MessageType.TRAIN,
            MessageType.EVALUATE,
        }:
            return (work() for work in works)
        begin_run(self.command)
        done: dict[int, Message] = {}
        # Answered one by one, each client reports the error.
        with contextlib.suppress(SettingsError):
            setups = [client_setup(c, self.run_config, strict=False) for c in contexts]
            self.read_message(messages[0], contexts[0])
            asked = [*map(Asked, setups, requests, contexts)] if self.size > 1 else []
            if asked and kinds == {MessageType.EVALUATE}:
                done = evaluate_rows(asked)
            # Mods must see every message.
            elif asked and kinds == {MessageType.TRAIN} and not self.mods:
                done = fit_rows(asked, self._most(), self.cohort == "auto")
        # The steps of a single client are only stacked to be captured.
        if self.size == 1 and not are_captured(current()):
            return (work() for work in works)
        others = [work for i, work in enumerate(works) if i not in done]
        rest = each_together(others, self._most(), self.cohort == "auto")
        return (done.pop(i) if i in done else next(rest) for i in range(len(works)))

    def _most(self) -> int:
        """Return the largest number of clients that train together on this device."""
        on_cpu = self.cohort == "auto" and current() == CPU
        return AUTO_ON_CPU if on_cpu else self.size


def make_app(run_config: Settings | None = None, mods: Sequence[Mod] = ()) -> ClientApp:
    """Return the ClientApp.

    Parameters
    ----------
    run_config : mapping, optional
        Settings; by default the context's, as with ``flwr run``.
    mods : sequence of Mod, optional
        Flower's mods around training, the outermost first. They see messages, never
        personal state.

    Returns
    -------
    ClientApp
        Answers train, evaluate and query messages. ``query.arrays`` returns the initial
        arrays, ``query.statistics`` the result of the client's method ``statistics``.
    """
    app = App(run_config, mods)

    app.train("secure")(answer)

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        is_secure = SECURE in message.content
        if is_secure or "secure-aggregation" in context.node_config:
            check_message(message, context)
        setup, config = app.read_message(message, context)
        client = build_client(context, setup, config, trains=True)
        result = client.fit(unpack(message.content, client), config)
        reply = pack(message, client, result)
        if is_secure:
            return mask(message, context, reply, client._state.directory)
        return reply

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = app.client(message, context)
        result = client.evaluate(unpack(message.content, client), client.config)
        return pack_evaluation(message, client, result)

    @app.evaluate(keys.NEWCOMER)
    def newcomer(message: Message, context: Context) -> Message:
        client = app.client(message, context)
        client._receive(unpack(message.content, client), client.config)
        client.personalize()
        result = client._test(client.deployed_model())
        return pack_evaluation(message, client, result)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        name = str(context.node_id)
        properties: Config = {keys.CLIENT: name}
        try:
            check_version(message.content.get(keys.CONFIG, {}))
            properties[keys.CLIENT] = name = client_name(context.node_config)
            setup, config = app.read_message(message, context)
            refusal = config.get(keys.REFUSAL)
            check_rules(context.node_config, setup.run)
            # Before the checks, so that a refused client has a label as well.
            properties |= label_of(context, setup)
            properties |= properties_of(context, setup, config)
        except SettingsError as error:
            # If it were raised, Flower would bury it in a traceback.
            refusal = properties[keys.REFUSAL] = str(error)
        if refusal is not None:
            label = properties.get(keys.OWN_NAME, name)
            log(ERROR, "client %s takes no part: %s", label, refusal)
        # Flower checks the types, as a subclass may have added properties.
        records = {keys.PROPERTIES: ConfigRecord(cast(Any, properties))}
        return Message(fill(RecordDict(), records), reply_to=message)

    def arrays_reply(message: Message, arrays: Arrays) -> Message:
        records = {keys.ARRAYS: memory_record(arrays)}
        return Message(fill(RecordDict(), records), reply_to=message)

    @app.query(keys.INITIAL_ARRAYS)
    def query_arrays(message: Message, context: Context) -> Message:
        client = app.client(message, context)
        names = client._array_names(client.shared)
        arrays = client.get_parameters(client.config)
        return arrays_reply(message, dict(zip(names, arrays, strict=True)))

    @app.query(keys.STATISTICS)
    def query_statistics(message: Message, context: Context) -> Message:
        check_message(message, context)
        client = app.client(message, context)
        config = client.config
        if keys.ARRAYS in message.content:
            client._receive(unpack(message.content, client), config)
        # Only clients whose strategies query statistics define this method.
        statistics: Any = getattr(client, "statistics", None)
        arrays = statistics(config) if statistics else {}
        copies = {name: np.array(value, order="C") for name, value in arrays.items()}
        return arrays_reply(message, copies)

    return app


# Only in simulation


def try_out(settings: Resolved, num_clients: int) -> list[Client]:
    """Build and check the first client of each of ``client-models``.

    Raises `SettingsError` if a model cannot be built, or its shared arrays differ from
    the first one's.
    """
    models = str(settings.get("client-models", "")).split() or [""]
    clients: list[Client] = []
    for i in range(min(len(models), num_clients)):
        node = {"partition-id": i, "num-partitions": num_clients}
        context = Context(0, 0, {**node}, RecordDict(), {})
        clients.append(build_client(context, client_setup(context, settings), {}))
        clients[i].get_properties({})
        for pair in zip_longest(*(clients[0]._structure(), clients[i]._structure())):
            first, other = map("{0}: {1}".format, (models[0], models[i]), pair)
            allowed = f"models that share arrays of equal shapes, not {first}; {other}"
            same = pair[0] == pair[1]
            require(same, "client-models", settings["client-models"], allowed)
    return clients


def keep(
    contexts: Iterable[Context],
    settings: Resolved,
    run: str,
    acknowledged: Mapping[str, int],
) -> bool:
    """Write the states that clients hold in memory to the run's directory.

    The version of each client's last acknowledged round is written, if there is one.
    Failures are logged. Return True if all states are written.
    """
    written = True
    # Only with `resume` or checkpoints do states have a directory.
    resumed = Resolved({**settings, "resume": settings["output"]})
    for context in contexts:
        name = client_name(context.node_config)
        last = acknowledged.get(name, 0)
        rounds = {keys.ACKNOWLEDGED_ROUND: last, keys.CHECKPOINT_ROUND: last}
        try:
            setup = client_setup(context, resumed)
            state = personal_state(context, setup, {keys.RUN: run, **rounds})
            on_disk = {(v.run, v.round) for v in versions_in(state.directory)}
            if state.round and (run, state.round) not in on_disk:
                path = state.save(state.load() or {}, state.round)
                written = written and path is not None
            PrivateTraining(setup.device, context.state, state.directory).write()
        except SettingsError as error:
            log(ERROR, "the state of client %s is in memory only: %s", name, error)
            written = False
    return written


full_app = make_app()
