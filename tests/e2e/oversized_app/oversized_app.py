"""Unmodified FedRep, with one node that adds a large record to its second reply."""

from flwr.app import ConfigRecord, Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp

from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies.server_app import run, server_settings

SIZE = 100_000_000


def add_record(message: Message, context: Context, call_next) -> Message:
    reply = call_next(message, context)
    trains = message.metadata.message_type == MessageType.TRAIN
    second = trains and message.content["config"]["server-round"] == 2
    if second and "extra" in context.node_config:
        reply.content["extra"] = ConfigRecord({"data": bytes(SIZE)})
    return reply


server = ServerApp()
client = make_app(mods=[add_record])


@server.main()
def main(grid: Grid, context: Context) -> None:
    run(grid, server_settings(context.run_config))
