"""The Flower ClientApp: turns a Message into a call of a NumPyClient and back."""

import hashlib
from collections.abc import Sequence
from logging import ERROR
from pathlib import Path
from typing import cast
from urllib.parse import quote

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
    UserConfig,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common import NDArray, NDArrays, Scalar, log

from clients import CLIENTS, LINEAR_CLIENTS
from clients.base import Client
from clients.device.card import ModelCard
from clients.device.state import PersonalState
from task.settings import Settings, SettingsError, resolve, unknown
from task.tasks.image import ImageTask, build_task
from task.tasks.multi_task import MULTI_TASKS

NEED_CLASSES = ("flute", "flute-star", "srpfl-flute")
# A device may say where its own data are, and with 0 sources that it is a target.
NODE_SETTINGS = ("data-dir", "cache-dir", "num-sources")

# Told to the server, which can name them when they are not those of the others.
INPUTS = ("channels", "height", "width")


def client_class(settings: Settings) -> type[Client]:
    """Return the client of the algorithm that the settings name.

    Parameters
    ----------
    settings : mapping
        All settings.

    Returns
    -------
    type of Client
        The class.

    Raises
    ------
    SettingsError
        If there is no such algorithm, or not for this task.
    """
    algorithm = str(settings["algorithm"])
    if algorithm not in CLIENTS:
        raise unknown("algorithm", algorithm, CLIENTS)
    task = str(settings["task"])
    if (task in MULTI_TASKS) != (algorithm == "multi-task"):
        raise SettingsError(
            f"the task {task!r} is none for the algorithm {algorithm!r}; "
            f"multi-task, and nothing else, runs on {', '.join(MULTI_TASKS)}"
        )
    if task == "transfer" and algorithm in NEED_CLASSES:
        raise SettingsError(
            f"the task 'transfer' is none for the algorithm {algorithm!r}, whose heads "
            "belong to classes"
        )
    if task == "linear" and algorithm in LINEAR_CLIENTS:
        return LINEAR_CLIENTS[algorithm]
    return CLIENTS[algorithm]


def complete(settings: Settings) -> Settings:
    """Fill in what the algorithm decides where a setting leaves it open.

    Parameters
    ----------
    settings : mapping
        All settings.

    Returns
    -------
    mapping
        The same with ``head-layers`` above 0.
    """
    if settings["head-layers"] != 0:
        return settings
    return {**settings, "head-layers": client_class(settings).head_layers}


def client_name(context: Context) -> str:
    """Return who this client is, the same in every run.

    Parameters
    ----------
    context : flwr.app.Context
        Its node config has ``client-name`` (a device) or ``partition-id`` (simulation).

    Returns
    -------
    str
        The name; partition ids are padded so that they sort as numbers.
    """
    config = context.node_config
    if "client-name" in config:
        return str(config["client-name"])
    if "partition-id" in config:
        return f"{int(config['partition-id']):06d}"
    raise SettingsError(
        "the node config has neither client-name nor partition-id; start the SuperNode "
        "with --node-config 'client-name=\"NAME\"'"
    )


def build_client(context: Context, settings: Settings, config: ConfigRecord) -> Client:
    """Return the client that a message is for.

    Parameters
    ----------
    context : flwr.app.Context
        The node's config and state.
    settings : mapping
        All settings.
    config : ConfigRecord
        Of the message: ``run``, ``acknowledged-round`` and ``checkpoint-round``, where
        the server keeps count of them.

    Returns
    -------
    Client
        The client.
    """
    node = context.node_config
    num_clients, index = 0, 0
    if "partition-id" in node:
        num_clients = int(node.get("num-partitions", settings["num-clients"]))
        index = int(node["partition-id"])
    task = build_task(settings, num_clients)
    acknowledged = config.get("acknowledged-round")
    run = str(config.get("run", context.run_id))
    state = PersonalState(
        context,
        state_directory(context, settings, run),
        None if acknowledged is None else int(cast(int, acknowledged)),
        int(cast(int, config.get("checkpoint-round", 0))),
        run,
        client_name(context),
        ModelCard.of(task).metadata() if isinstance(task, ImageTask) else {},
    )
    return client_class(settings)(task, index, state, settings)


def state_directory(context: Context, settings: Settings, run: str) -> Path | None:
    """Return where this client's state is kept on disk.

    Parameters
    ----------
    context : flwr.app.Context
        A device's node config has ``state-dir``.
    settings : mapping
        Runs of the same ``experiment`` share their state; without a name a run is on
        its own, with those that resume it.
    run : str
        The run.

    Returns
    -------
    Path or None
        The directory.
    """
    node = context.node_config
    # No name leads out of the directory.
    name = quote(client_name(context), safe="").replace(".", "%2E")
    if "state-dir" in node:
        experiment = quote(str(settings["experiment"]), safe="").replace(".", "%2E")
        root = Path(str(node["state-dir"])).expanduser()
        return root / (experiment or f"run-{run}") / name
    resumable = int(settings["checkpoint-every"]) > 0 or settings["resume"]
    if resumable and "partition-id" in node:
        output = Path(str(settings["output"])) / str(settings["algorithm"])
        return output / "clients" / name
    return None


def _settings(context: Context, run_config: UserConfig | None) -> Settings:
    given = context.run_config if run_config is None else run_config
    node = context.node_config
    own = {name: node[name] for name in NODE_SETTINGS if name in node}
    return complete(resolve({**given, **own}))


def _seed(context: Context, settings: Settings, config: ConfigRecord) -> None:
    """Seed torch from seed, client and round, never from the worker that runs it."""
    server_round = config.get("server-round", 0)
    text = f"{settings['seed']}/{client_name(context)}/{server_round!r}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    # Not torch.manual_seed: before CUDA starts, that keeps a stack trace of every call.
    torch.default_generator.manual_seed(seed)


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
        Answers train, evaluate and query messages, and ``query.arrays``: the initial
        arrays.
    """
    app = ClientApp()

    def open_message(
        message: Message, context: Context
    ) -> tuple[Client, dict[str, Scalar]]:
        settings = _settings(context, run_config)
        torch.set_num_threads(int(settings["torch-threads"]))
        record = message.content.config_records.get("config", ConfigRecord())
        _seed(context, settings, record)
        client = build_client(context, settings, record)
        return client, cast(dict[str, Scalar], dict(record))

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        client, config = open_message(message, context)
        names, parameters = _unpack(message, client)
        arrays, num_examples, metrics = client.fit(parameters, config)
        records = _pack(message, dict(zip(names, arrays, strict=True)))
        if "server-round" in config:
            # Content of another round must not pass for this one's.
            metrics = {**metrics, "server-round": config["server-round"]}
        records.update(_metrics(num_examples, metrics))
        return Message(records, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client, config = open_message(message, context)
        _, parameters = _unpack(message, client)
        loss, num_examples, metrics = client.evaluate(parameters, config)
        records = _metrics(num_examples, {"loss": loss, **metrics})
        return Message(records, reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        name = client_name(context)
        properties: dict[str, Scalar] = {"client": name}
        try:
            client, config = open_message(message, context)
            properties |= client.get_properties(config)
            refusal = config.get("refusal")
            if isinstance(client.task, ImageTask):
                properties |= zip(INPUTS, client.task.shape, strict=True)
        except SettingsError as error:
            # Not as an exception: Flower would bury the line in a traceback.
            refusal = properties["refusal"] = str(error)
        if refusal is not None:
            log(ERROR, "client %s takes no part: %s", name, refusal)
        return Message(
            RecordDict({"properties": ConfigRecord(dict(properties))}),
            reply_to=message,
        )

    @app.query("arrays")
    def query_arrays(message: Message, context: Context) -> Message:
        client, config = open_message(message, context)
        arrays = client.get_parameters(config)
        names = client.names(client.shared)
        record = ArrayRecord({n: Array(a) for n, a in zip(names, arrays, strict=True)})
        return Message(RecordDict({"arrays": record}), reply_to=message)

    return app


def _unpack(message: Message, client: Client) -> tuple[list[str], NDArrays]:
    """Return names and values of all arrays of a message, checked against the client.

    What is not shared can be neither received nor asked for.
    """
    received = {
        name: array
        for record in message.content.array_records.values()
        for name, array in record.items()
    }
    expected = client.names(client.shared)
    if sorted(received) != sorted(expected):
        wrong = sorted(set(received) ^ set(expected))
        raise SettingsError(
            f"the message's arrays do not fit this client's model: {', '.join(wrong)} "
            "on one side only"
        )
    return expected, [received[name].numpy() for name in expected]


def _pack(message: Message, arrays: dict[str, NDArray]) -> RecordDict:
    """Return arrays in the records in which the message had them."""
    return RecordDict(
        {
            key: ArrayRecord(
                {n: Array(_as_received(arrays[n], a.dtype)) for n, a in record.items()}
            )
            for key, record in message.content.array_records.items()
        }
    )


def _as_received(array: NDArray, dtype: str) -> NDArray:
    """Return an array as float16 where it came as float16 (``transport``)."""
    if dtype == "float16" and array.dtype == np.float32:
        # What is too large becomes infinite, and the server says so.
        with np.errstate(over="ignore"):
            return array.astype(np.float16)
    return array


def _metrics(num_examples: int, metrics: dict[str, Scalar]) -> RecordDict:
    """Return metrics as records: numbers in ``metrics``, and bytes in ``bytes``."""
    data = {n: v for n, v in metrics.items() if isinstance(v, bytes)}
    values = {n: float(cast(float, v)) for n, v in metrics.items() if n not in data}
    records = RecordDict(
        {"metrics": MetricRecord({"num-examples": num_examples, **values})}
    )
    if data:
        records["bytes"] = ConfigRecord(dict(data))
    return records


app = make_app()
