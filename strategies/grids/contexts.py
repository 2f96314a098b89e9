"""Contexts of the virtual nodes of a simulation."""

from collections.abc import Iterator, MutableMapping

from flwr.app import Context, RecordDict, UserConfig


class Contexts(MutableMapping[int, Context]):
    """The contexts of virtual nodes, created on demand.

    Parameters
    ----------
    num_clients : int
        Number of nodes; node i + 1 has the partition id i.
    run_config : UserConfig
        The clients' run config.
    """

    def __init__(self, num_clients: int, run_config: UserConfig) -> None:
        self._num_clients, self._run_config = num_clients, run_config
        # None until a context has a state or has been requested.
        self._held: dict[int, Context | None]
        self._held = dict.fromkeys(range(1, num_clients + 1))

    def __getitem__(self, node: int) -> Context:
        context = self._held[node] = self.look_up(node)
        return context

    def __setitem__(self, node: int, context: Context) -> None:
        self._held[node] = context

    def __delitem__(self, node: int) -> None:
        del self._held[node]

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def look_up(self, node: int) -> Context:
        """Return a node's context; a new one is not stored."""
        return self._held[node] or Context(
            run_id=1,
            node_id=node,
            node_config={
                "partition-id": node - 1,
                "num-partitions": self._num_clients,
            },
            state=RecordDict(),
            run_config=self._run_config,
        )

    def held(self) -> list[Context]:
        """Return the stored contexts."""
        return [context for context in self._held.values() if context]
