"""Strategies whose server keeps every client's head."""

from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from strategies.base import BaseStrategy
from strategies.server.replies import Arrays, to_record

HEAD = "head"


class HeadsOnServer(BaseStrategy):
    """Each client is sent, and returns, its own head beside the shared arrays.

    Heads belong to clients by name. Those of sampled clients travel; a client that has
    not trained yet has the initial head, which is stored once. So memory is one head
    for each client that has trained: 4 k m + 4 m bytes of float32 for k features and m
    classes.

    Parameters
    ----------
    **base
        As for `BaseStrategy`.
    """

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        self.heads: dict[str, Arrays] = {}

    def head(self, name: str) -> Arrays:
        """Return a client's current head.

        Parameters
        ----------
        name : str
            The client.

        Returns
        -------
        dict of str to ndarray
            By parameter name.
        """
        raise NotImplementedError

    def content(
        self, node: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> RecordDict:
        """Return what one client is sent: the shared arrays and its own head.

        Parameters
        ----------
        node : int
            The client's node.
        arrays : ArrayRecord
            The shared arrays.
        config : ConfigRecord
            The config.

        Returns
        -------
        RecordDict
            As `BaseStrategy.content`, and ``head``.
        """
        content = super().content(node, arrays, config)
        content[HEAD] = to_record(self.head(self.name_of(node)))
        self._expected[HEAD] = content.array_records[HEAD]
        return content

    def state_dict(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the state, with all heads.

        Returns
        -------
        arrays, values
            As `BaseStrategy.state_dict`; heads are ``heads/<client>/<name>``.
        """
        arrays, values = super().state_dict()
        for client, head in self.heads.items():
            arrays |= {f"heads/{client}/{name}": a for name, a in head.items()}
        return arrays, values

    def load_state_dict(self, arrays: Arrays, values: dict[str, Any]) -> None:
        """Go back to a saved state.

        Parameters
        ----------
        arrays, values
            As `state_dict` returned them.
        """
        super().load_state_dict(arrays, values)
        self.heads = {}
        for key, array in arrays.items():
            kind, _, rest = key.partition("/")
            if kind == "heads":
                client, _, name = rest.rpartition("/")
                self.heads.setdefault(client, {})[name] = array
