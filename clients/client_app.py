"""The Flower ClientApp: translates between messages and calls of a NumPyClient."""

from collections.abc import Callable, Sequence
from functools import partial
from logging import ERROR, WARNING
from typing import cast

import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    RecordDict,
    UserConfig,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common import log

from flwr_frl.clients.base import Client, Config
from flwr_frl.clients.device.parameter_groups import array_names
from flwr_frl.clients.device.records import (
    check_config,
    checked,
    pack,
    pack_metrics,
    unpack,
)
from flwr_frl.clients.device.setup import (
    build_client,
    client_name,
    client_setup,
    cohort_size,
    rounded_count,
    seed_torch,
    unread,
)
from flwr_frl.clients.device.simulated import join, simulated_properties
from flwr_frl.task.devices import is_out_of_memory, out_of_memory, use
from flwr_frl.task.messages import (
    ARRAYS,
    CLIENT,
    CONFIG,
    EXAMPLE_EPSILON,
    FITTED,
    INITIAL_ARRAYS,
    INPUTS,
    NEWCOMER,
    NUM_EXAMPLES,
    NUM_TEST_EXAMPLES,
    PROPERTIES,
    REFUSAL,
    RUN,
    SHARE,
    STATISTICS,
)
from flwr_frl.task.run_cache import begin_run, current_run
from flwr_frl.task.settings import SettingsError
from flwr_frl.task.tasks import reads_data_dir
from flwr_frl.task.tasks.image import ImageTask
from flwr_frl.task.training import together


class App(ClientApp):
    """A Flower ClientApp in which clients of one process can train together.

    Parameters
    ----------
    run_config : UserConfig, optional
        Settings; ``cohort`` and ``device`` default to ``auto``.
    """

    def __init__(self, run_config: UserConfig | None) -> None:
        super().__init__()
        self.run_config = run_config
        self.cohort = str((run_config or {}).get("cohort", "auto"))
        self.size = cohort_size(self.cohort)
        self.device = str((run_config or {}).get("device", "auto"))
        # Sent to workers, which may hold caches of an earlier command.
        self.command = current_run()

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message; running out of memory raises a one-line error."""
        begin_run(self.command)
        try:
            return super().__call__(message, context)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            setup = client_setup(context, self.run_config)
            sizes = f"batch-size ({setup.run.batch_size}) or cohort ({self.cohort})"
            advice = f"lower {sizes}, or train on another device"
            raise out_of_memory(error, advice) from None

    def together(self, works: Sequence[Callable[[], Message]]) -> list[Message]:
        """Run several clients together; see `flwr_frl.task.training.together`."""
        if self.size <= 1:
            return [work() for work in works]
        return together(works, self.size, where_it_pays=self.cohort == "auto")


def make_app(
    run_config: UserConfig | None = None, mods: Sequence[Mod] = ()
) -> ClientApp:
    """Return the ClientApp.

    Parameters
    ----------
    run_config : UserConfig, optional
        Settings; by default the context's, as with ``flwr run``.
    mods : sequence of Mod, optional
        Flower's mods around training, the outermost first. They see messages, never
        personal state.

    Returns
    -------
    ClientApp
        Answers train, evaluate and query messages. ``query.arrays`` returns the initial
        arrays, ``query.statistics`` the result of `Client.statistics`.
    """
    app = App(run_config)

    def open_message(
        message: Message, context: Context
    ) -> tuple[Client, Config, Callable[[int], int]]:
        setup = client_setup(context, run_config)
        torch.set_num_threads(setup.device.torch_threads)
        use(setup.device.device)
        record = message.content.get(CONFIG)
        config = check_config(
            record if isinstance(record, ConfigRecord) else ConfigRecord()
        )
        seed_torch(context, setup.run.seed, config)
        client = build_client(context, setup, config)
        multiple = setup.device.count_multiple
        return client, config, partial(rounded_count, multiple=multiple)

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        client, config, rounded = open_message(message, context)
        result = client.fit(unpack(message, client), config)
        arrays, n, metrics = checked(client, result)
        reply = arrays, rounded(n), metrics
        return Message(pack(message, client, reply, config), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client, config, rounded = open_message(message, context)
        loss, n, metrics = client.evaluate(unpack(message, client), config)
        all_metrics = {"loss": loss, **metrics, **_spent(client)}
        records = pack_metrics(client, rounded(n), all_metrics)
        return Message(records, reply_to=message)

    @app.evaluate(NEWCOMER)
    def newcomer(message: Message, context: Context) -> Message:
        client, config, rounded = open_message(message, context)
        seed = client_setup(context, run_config).run.seed
        share = float(config.get(SHARE, 1.0))
        loss, n, metrics = join(client, unpack(message, client), config, share, seed)
        metrics[FITTED] = rounded(int(metrics[FITTED]))
        all_metrics = {"loss": loss, **metrics, **_spent(client)}
        records = pack_metrics(client, rounded(n), all_metrics)
        return Message(records, reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        name = str(context.node_id)
        properties: Config = {CLIENT: name}
        try:
            properties[CLIENT] = name = client_name(context)
            client, config, rounded = open_message(message, context)
            properties |= client.get_properties(config)
            run = client_setup(context, run_config).run
            for count in (NUM_EXAMPLES, NUM_TEST_EXAMPLES):
                if count in properties:
                    properties[count] = rounded(cast(int, properties[count]))
            if RUN in config and client.personal:
                properties |= cast(Config, client.state.kept())
            refusal = config.get(REFUSAL)
            if "partition-id" in context.node_config:
                properties |= simulated_properties(client, context, run)
            else:
                for note in getattr(client.task, "notes", ()):
                    log(WARNING, "%s", note)
            # Only here: each message of a device has its own process and its own log.
            ignored = unread(context.node_config, type(client))
            if not reads_data_dir(client.task, run.task):
                ignored += [n for n in context.node_config if n == "data-dir"]
            for unknown in ignored:
                log(WARNING, "%s in the node config is not read", unknown)
            if isinstance(client.task, ImageTask):
                properties |= zip(INPUTS, client.task.shape, strict=True)
        except SettingsError as error:
            # Raised, it would be buried in a traceback of Flower's.
            refusal = properties[REFUSAL] = str(error)
        if refusal is not None:
            log(ERROR, "client %s takes no part: %s", name, refusal)
        records = RecordDict({PROPERTIES: ConfigRecord(dict(properties))})
        return Message(records, reply_to=message)

    @app.query(INITIAL_ARRAYS)
    def query_arrays(message: Message, context: Context) -> Message:
        client, config, _ = open_message(message, context)
        names = array_names(client, client.shared)
        arrays = zip(names, client.get_parameters(config), strict=True)
        record = ArrayRecord({name: Array(array) for name, array in arrays})
        return Message(RecordDict({ARRAYS: record}), reply_to=message)

    @app.query(STATISTICS)
    def query_statistics(message: Message, context: Context) -> Message:
        client, config, _ = open_message(message, context)
        arrays = client.statistics(config)
        record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        return Message(RecordDict({ARRAYS: record}), reply_to=message)

    return app


def _spent(client: Client) -> Config:
    """Return the ε spent by a client that trains privately."""
    return {EXAMPLE_EPSILON: client._private.epsilon()} if client._private else {}


app = make_app()
