"""Unmodified FedRep, with one node that adds a large record to each valid reply."""

from pathlib import Path

from flwr.app import ConfigRecord, Context, Message
from flwr.serverapp import Grid, ServerApp

from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies.server_app import run, server_settings


def add_record(message: Message, context: Context, call_next) -> Message:
    """Add a record, whose size in bytes is in a file named by the node config."""
    reply = call_next(message, context)
    size = Path(str(context.node_config.get("extra", "nowhere")))
    if size.exists():
        data = bytes(int(size.read_text()))
        reply.content["extra"] = ConfigRecord({"data": data})
    return reply


server = ServerApp()
client = make_app(mods=[add_record])


@server.main()
def main(grid: Grid, context: Context) -> None:
    run(grid, server_settings(context.run_config))
