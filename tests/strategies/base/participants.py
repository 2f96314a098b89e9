"""Clients that are honest except for some properties, by partition."""

from flwr.app import MessageType, RecordDict
from function_clients import Client, changing


def properties_of(**changes: dict[int, object]) -> Client:
    def change(content: RecordDict, i: int) -> None:
        for name, values in changes.items():
            if i in values:
                content.config_records["properties"][name] = values[i]

    return changing(MessageType.QUERY, change)
