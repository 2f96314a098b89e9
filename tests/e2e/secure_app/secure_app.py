"""Unmodified FedRep; a device with ``dies`` waits in round 2 until it is killed."""

import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies.server_app import serve, server_settings


def wait(message: Message, context: Context, call_next) -> Message:
    if "dies" in context.node_config and message.metadata.group_id == "2":
        Path(str(context.node_config["dies"])).touch()
        time.sleep(600)
    return call_next(message, context)


server = ServerApp()
client = make_app(mods=[wait])


@server.main()
def main(grid: Grid, context: Context) -> None:
    serve(grid, server_settings(context.run_config))
