"""The Flower ClientApp as devices load it, which imports torch only when it is needed.

A device handles each message in a new process. The short steps of secure aggregation
need no torch, whose import takes longer than all else that they do.
"""

from importlib import import_module
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flwr_frl.clients.device.secure import answer
from flwr_frl.common.secure.messages import SHORT


class LazyApp(ClientApp):
    """Answers short steps itself, and all else with `flwr_frl.clients.app`."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        if message.metadata.message_type == SHORT:
            return answer(message, context)
        reply: Message = __getattr__("full_app")(message, context)
        return reply


app = LazyApp()


def __getattr__(name: str) -> Any:
    """Return everything else, such as ``make_app``, from `flwr_frl.clients.app`."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module("flwr_frl.clients.app"), name)
