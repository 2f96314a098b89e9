"""Unmodified FedRep, with one registered node that sends hostile replies."""

import io
import pickle
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp

from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies.server_app import run, server_settings

GIGABYTE = 10**9


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def arrays_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}


def wrong_names(arrays, planted):
    return {f"{name}x": Array(value) for name, value in arrays.items()}


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
    # As few names as possible, since they are part of the message itself
    name = next(iter(arrays))
    return {name: Array(np.zeros(GIGABYTE // 4, np.float32))}


def replay(reply: Message, context: Context, server_round: int) -> None:
    """Reply to the current message with the content of the reply of round 1."""
    for name in ("arrays", "metrics"):
        reply.content[name] = context.state[f"kept-{name}"]


# Flower sends a reply as the ClientApp has addressed it, but the SuperLink drops a
# reply unless it answers an open message to the node that it names as its sender. The
# ServerApp therefore never receives this reply, nor would it receive a second reply to
# an old message, and waits until the round times out. (Flower 1.41 does not verify the
# sender: a node that knew the id of an honest node and that of its message, both of
# which are random, could reply in its place.)


def to_another(reply: Message, context: Context, server_round: int) -> None:
    """Reply to an honest node's message, whose id it could not guess without a file."""
    path = ids_of(context, server_round)
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    reply.metadata.__dict__["_reply_to_message_id"] = path.read_text()
    path.with_name("answered").touch()


WHOLE = (replay, to_another)
# One attack per round. On a slow machine the gigabyte may be late; the node is then
# not asked in the last round.
ATTACKS = (wrong_names, pickled, replay, a_gigabyte_of_zeros, to_another)


def ids_of(context: Context, server_round: int) -> Path:
    return Path(str(context.node_config["ids"])) / str(server_round)


def tell_and_wait(message: Message, context: Context, server_round: int) -> None:
    path = ids_of(context, server_round)
    partial = path.with_suffix(".partial")
    partial.write_text(message.metadata.message_id)
    partial.rename(path)
    # The hostile reply must come first. It is being sent once this file exists.
    deadline = time.monotonic() + 15
    while not path.with_name("answered").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(3)


def tamper(message: Message, context: Context, call_next) -> Message:
    server_round = int(message.content.config_records["config"]["server-round"])
    attack = ATTACKS[server_round - 1]
    if "planted" not in context.node_config:
        if attack is to_another and "ids" in context.node_config:
            tell_and_wait(message, context, server_round)
        return call_next(message, context)
    reply = call_next(message, context)
    if server_round == 1:
        for name in ("arrays", "metrics"):
            context.state[f"kept-{name}"] = reply.content[name]
    if attack in WHOLE:
        attack(reply, context, server_round)
    else:
        planted = str(context.node_config["planted"])
        arrays = arrays_of(reply.content.array_records["arrays"])
        reply.content["arrays"] = ArrayRecord(attack(arrays, planted))
    return reply


server = ServerApp()
client = make_app(mods=[tamper])


@server.main()
def main(grid: Grid, context: Context) -> None:
    run(grid, server_settings(context.run_config))
