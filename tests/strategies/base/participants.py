"""Clients that are honest except for some properties, by partition."""

from flwr.app import Context, Message, MessageType
from function_clients import Client, honest, partition_of


def properties_of(**changes: dict[int, object]) -> Client:
    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == MessageType.QUERY:
            record = reply.content.config_records["properties"]
            for name, values in changes.items():
                if partition_of(context) in values:
                    record[name] = values[partition_of(context)]
        return reply

    return client
