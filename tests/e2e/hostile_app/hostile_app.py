"""Unmodified FedRep, with one registered node that sends hostile replies."""

import io
import pickle
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies.server_app import serve, server_settings

LARGE = 100_000_000


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def wrong_names(content: RecordDict, context: Context) -> None:
    arrays = content.array_records["arrays"]
    content["arrays"] = ArrayRecord({f"{name}x": a for name, a in arrays.items()})


def pickled(content: RecordDict, context: Context) -> None:
    planted = Planted(str(context.node_config["planted"]))
    stream = io.BytesIO()
    objects = np.array([planted], dtype=object)
    np.lib.format.write_array(stream, objects, allow_pickle=True)
    for name, array in content.array_records["arrays"].items():
        array.data = stream.getvalue() if name.endswith("bias") else pickle.dumps(1)


def replay(content: RecordDict, context: Context) -> None:
    """Reply to the current message with the content of the reply of round 1."""
    for name in ("arrays", "metrics"):
        content[name] = context.state[f"kept-{name}"]


def large_record(content: RecordDict, context: Context) -> None:
    content["extra"] = ConfigRecord({"data": bytes(LARGE)})


# One attack per round
ATTACKS = (wrong_names, pickled, replay, large_record)


def tamper(message: Message, context: Context, call_next) -> Message:
    reply = call_next(message, context)
    if "planted" in context.node_config:
        server_round = int(message.content.config_records["config"]["server-round"])
        if server_round == 1:
            for name in ("arrays", "metrics"):
                context.state[f"kept-{name}"] = reply.content[name]
        ATTACKS[server_round - 1](reply.content, context)
    return reply


server = ServerApp()
client = make_app(mods=[tamper])


@server.main()
def main(grid: Grid, context: Context) -> None:
    serve(grid, server_settings(context.run_config))
