"""FedRep as it is, with one registered node whose replies are hostile."""

import io
import pickle
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp

from clients.client_app import make_app
from strategies.server_app import run
from task.settings import resolve

GIGABYTE = 10**9


class Planted:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def arrays_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}


def wrong_names(arrays, planted):
    return {f"{name}x": Array(value) for name, value in arrays.items()}


def wrong_shapes(arrays, planted):
    return {name: Array(value[..., :1]) for name, value in arrays.items()}


def wrong_dtypes(arrays, planted):
    return {name: Array(value.astype(np.float64)) for name, value in arrays.items()}


def not_finite(arrays, planted):
    return {name: Array(np.full_like(value, np.nan)) for name, value in arrays.items()}


def pickled(arrays, planted):
    stream = io.BytesIO()
    objects = np.array([Planted(planted)], dtype=object)
    np.lib.format.write_array(stream, objects, allow_pickle=True)
    result = {}
    for name, value in arrays.items():
        array = Array(value)
        array.data = stream.getvalue() if name.endswith("bias") else pickle.dumps(1)
        result[name] = array
    return result


def a_gigabyte_of_zeros(arrays, planted):
    # As few names as will do: the message itself has to hold them.
    name = next(iter(arrays))
    return {name: Array(np.zeros(GIGABYTE // 40, np.float32))}


ATTACKS = (
    wrong_names,
    wrong_shapes,
    wrong_dtypes,
    not_finite,
    pickled,
    a_gigabyte_of_zeros,
)


def tamper(message: Message, context: Context, call_next) -> Message:
    reply = call_next(message, context)
    if "planted" in context.node_config:
        server_round = int(message.content.config_records["config"]["server-round"])
        attack = ATTACKS[(server_round - 1) % len(ATTACKS)]
        record = reply.content.array_records["arrays"]
        planted = str(context.node_config["planted"])
        reply.content["arrays"] = ArrayRecord(attack(arrays_of(record), planted))
    return reply


server = ServerApp()
client = make_app(mods=[tamper])


@server.main()
def main(grid: Grid, context: Context) -> None:
    run(grid, resolve(context.run_config))
