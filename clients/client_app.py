"""The Flower ClientApp: turns a Message into a call of a NumPyClient and back."""

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
from flwr_frl.clients.device.identity import (
    build_client,
    client_name,
    client_setup,
    cohort_size,
    rounded_count,
    seed_torch,
    unread,
)
from flwr_frl.clients.device.received import check_config
from flwr_frl.clients.device.records import checked, pack, pack_metrics, unpack
from flwr_frl.clients.device.simulated import simulated_properties
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
    """Flower's ClientApp, in which several clients of one process train together.

    Parameters
    ----------
    run_config : UserConfig, optional
        Settings: ``cohort`` is how many, ``device`` where; ``auto`` without them.
    """

    def __init__(self, run_config: UserConfig | None) -> None:
        super().__init__()
        self.run_config = run_config
        self.cohort = str((run_config or {}).get("cohort", "auto"))
        self.size = cohort_size(self.cohort)
        self.device = str((run_config or {}).get("device", "auto"))
        # It comes to workers that may remember what an earlier command was about.
        self.command = current_run()

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message; no memory left is one line."""
        begin_run(self.command)
        try:
            return super().__call__(message, context)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            settings = client_setup(context, self.run_config).settings
            lower = [f"{n} ({settings[n]})" for n in ("batch-size", "cohort")]
            advice = f"lower {' or '.join(lower)}, or train on another device"
            raise out_of_memory(error, advice) from None

    def together(self, works: Sequence[Callable[[], Message]]) -> list[Message]:
        """Run some clients' works together; see `flwr_frl.task.training.together`."""
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
        Settings; by default those of the context, as ``flwr run`` gives them.
    mods : sequence of Mod, optional
        Flower's mods around training, the outermost first. They see what is sent, and
        never what a client keeps.

    Returns
    -------
    ClientApp
        Answers train, evaluate and query messages; ``query.arrays`` with the initial
        arrays and ``query.statistics`` with `Client.statistics`.
    """
    app = App(run_config)

    def open_message(
        message: Message, context: Context
    ) -> tuple[Client, Config, Callable[[int], int]]:
        setup = client_setup(context, run_config)
        torch.set_num_threads(int(setup.settings["torch-threads"]))
        use(str(setup.settings["device"]))
        found = message.content.get(CONFIG)
        record = found if isinstance(found, ConfigRecord) else ConfigRecord()
        config = check_config(record)
        seed_torch(context, setup.settings, config)
        client = build_client(context, setup, config)
        multiple = int(setup.settings["count-multiple"])
        return client, config, partial(rounded_count, multiple=multiple)

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        client, config, told = open_message(message, context)
        found = client.fit(unpack(message, client), config)
        arrays, n, metrics = checked(client, found)
        reply = arrays, told(n), metrics
        return Message(pack(message, client, reply, config), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client, config, told = open_message(message, context)
        loss, n, metrics = client.evaluate(unpack(message, client), config)
        said = {"loss": loss, **metrics, **_spent(client)}
        records = pack_metrics(client, told(n), said)
        return Message(records, reply_to=message)

    @app.evaluate(NEWCOMER)
    def join(message: Message, context: Context) -> Message:
        client, config, told = open_message(message, context)
        seed = int(client_setup(context, run_config).settings["seed"])
        share = float(config.get(SHARE, 1.0))
        loss, n, metrics = client.join(unpack(message, client), config, share, seed)
        metrics[FITTED] = told(int(metrics[FITTED]))
        said = {"loss": loss, **metrics, **_spent(client)}
        records = pack_metrics(client, told(n), said)
        return Message(records, reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        name = str(context.node_id)
        properties: Config = {CLIENT: name}
        try:
            properties[CLIENT] = name = client_name(context)
            client, config, told = open_message(message, context)
            properties |= client.get_properties(config)
            for count in (NUM_EXAMPLES, NUM_TEST_EXAMPLES):
                if count in properties:
                    properties[count] = told(cast(int, properties[count]))
            if RUN in config and client.personal:
                properties |= cast(Config, client.state.kept())
            refusal = config.get(REFUSAL)
            if "partition-id" in context.node_config:
                settings = client_setup(context, run_config).settings
                properties |= simulated_properties(client, context, settings)
            else:
                for note in getattr(client.task, "notes", ()):
                    log(WARNING, "%s", note)
            # Here, as a device's other messages have a process of their own each.
            ignored = unread(context.node_config, type(client))
            task_name = str(client_setup(context, run_config).settings["task"])
            if not reads_data_dir(client.task, task_name):
                ignored += [n for n in context.node_config if n == "data-dir"]
            for own in ignored:
                log(WARNING, "%s in the node config is not read", own)
            if isinstance(client.task, ImageTask):
                properties |= zip(INPUTS, client.task.shape, strict=True)
        except SettingsError as error:
            # Not as an exception: Flower would bury the line in a traceback.
            refusal = properties[REFUSAL] = str(error)
        if refusal is not None:
            log(ERROR, "client %s takes no part: %s", name, refusal)
        records = RecordDict({PROPERTIES: ConfigRecord(dict(properties))})
        return Message(records, reply_to=message)

    @app.query(INITIAL_ARRAYS)
    def query_arrays(message: Message, context: Context) -> Message:
        client, config, _ = open_message(message, context)
        names = client.names(client.shared)
        arrays = zip(names, client.get_parameters(config), strict=True)
        record = ArrayRecord({name: Array(array) for name, array in arrays})
        return Message(RecordDict({ARRAYS: record}), reply_to=message)

    @app.query(STATISTICS)
    def query_statistics(message: Message, context: Context) -> Message:
        client, config, _ = open_message(message, context)
        found = client.statistics(config)
        record = ArrayRecord({name: Array(array) for name, array in found.items()})
        return Message(RecordDict({ARRAYS: record}), reply_to=message)

    return app


def _spent(client: Client) -> Config:
    """Return the ε of a client that trains privately."""
    return {EXAMPLE_EPSILON: client.private.epsilon()} if client.private else {}


app = make_app()
