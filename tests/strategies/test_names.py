"""Names of clients: keys, registered names, and nodes that change."""

from dataclasses import dataclass

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from function_clients import averaging, grid_of, honest
from participants import properties_of

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import resolve
from flwr_frl.strategies import DPSGD, FLUTE
from flwr_frl.strategies.base import Strategy
from flwr_frl.strategies.grids.inbox import Inbox
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.clients import Clients


@dataclass
class Info:
    node_id: int
    public_key: bytes
    name: str = ""


class Keyed(InlineGrid):
    """Nodes with the given keys, which report the given names."""

    def __init__(self, keys: dict[int, bytes], names: dict[int, str]) -> None:
        def client(message: Message, context: Context) -> Message:
            reply = honest(message, context)
            if message.metadata.message_type == MessageType.QUERY:
                record = reply.content.config_records["properties"]
                record["client"] = names[context.node_id]
                record["classes"] = "11"
                record["message-bytes"] = [8]
                record["omega"] = record["typical-omega"] = 1.0
            return reply

        super().__init__(client, len(keys))
        contexts = list(self.contexts.values())
        self.contexts.data = dict(zip(keys, contexts, strict=True))
        for node, context in self.contexts.items():
            context.node_id = node
        self.keys = keys

    def get_nodes(self):
        return [Info(node, key) for node, key in self.keys.items()]


def keyed(strategy: Strategy) -> Strategy:
    strategy._run.clients.keyed = True
    return strategy


FIRST = {1: b"key of a", 2: b"key of b", 3: b"key of c"}
NAMES = {1: "a", 2: "b", 3: "c"}
# Device b is offline, and another node claims its name.
WITHOUT_B = {1: b"key of a", 4: b"of a thief", 3: b"key of c"}
THIEF = {1: "a", 4: "b", 3: "c"}


@pytest.mark.parametrize("wrap", [lambda g: g, Inbox])
def test_name_of_an_offline_device_cannot_be_taken(wrap, caplog) -> None:
    strategy = keyed(averaging())
    assert strategy._identify(wrap(Keyed(FIRST, NAMES))) == [1, 2, 3]
    assert strategy._identify(wrap(Keyed(WITHOUT_B, THIEF))) == [1, 3]
    assert "calls itself 'b', which is the name of another key" in caplog.text
    # Device b reconnects as another node with its key.
    back = {1: b"key of a", 4: b"of a thief", 9: b"key of b"}
    assert strategy._identify(wrap(Keyed(back, {**THIEF, 9: "b"}))) == [1, 9]
    assert strategy._run.clients.name_of(9) == "b"
    # A key may have several names, and unused names are available.
    renamed = wrap(Keyed(back, {1: "a", 4: "d", 9: "b"}))
    assert [1, 9, 4] in [strategy._identify(renamed) for _ in range(4)]


def test_a_new_key_is_explained(caplog) -> None:
    strategy = keyed(averaging())
    strategy._run.clients.keys = dict.fromkeys("b", "digest of its former key")
    assert strategy._identify(Keyed(FIRST, NAMES)) == [1, 3]
    remedy = "restore the device's former key, choose another name, or begin a run"
    assert f"'b', which is the name of another key; {remedy}" in caplog.text


def test_names_stay_bound_to_keys_after_a_resume() -> None:
    strategy = keyed(averaging())
    strategy._identify(Keyed(FIRST, NAMES))
    again = keyed(averaging())
    again._restore(strategy._snapshot())
    assert again._identify(Keyed(WITHOUT_B, THIEF)) == [1, 3]


def test_impostor_receives_neither_head_nor_messages() -> None:
    flute = keyed(FLUTE(fraction_train=1.0))
    start = {
        "representation.weight": np.zeros((2, 2), np.float32),
        "head.weight": np.zeros((2, 2), np.float32),
    }
    flute.initial_head = {"head.weight": start["head.weight"]}
    flute._identify(Keyed(FIRST, NAMES))
    flute.heads["b"] = {"head.weight": np.ones((2, 2), np.float32)}
    messages = flute.configure_train(
        1,
        ArrayRecord(),
        {},
        Keyed(WITHOUT_B, THIEF),  # type: ignore[arg-type]
    )
    assert {m.metadata.dst_node_id for m in messages} == {1, 3}
    gossip = keyed(DPSGD(graph="complete"))
    assert gossip._identify(Keyed(FIRST, NAMES)) == [1, 2, 3]
    assert gossip._identify(Keyed(WITHOUT_B, THIEF)) == [1, 3]


# Registered names of SuperNodes


class Named(Keyed):
    """Nodes with registered names."""

    def __init__(
        self, keys: dict[int, bytes], names: dict[int, str], registered: dict[int, str]
    ) -> None:
        super().__init__(keys, names)
        self.registered = registered

    def get_nodes(self):
        return [
            Info(n, key, self.registered.get(n, "")) for n, key in self.keys.items()
        ]


def test_registered_name_is_used_by_clients_without_a_name() -> None:
    grid = Named(FIRST, NAMES, {1: "pi-1", 2: "pi-2", 3: "pi-3"})
    configs = {2: {"client-name": "other"}, 3: {"partition-id": 4}}
    names, clients, app = [], Clients(), make_app(resolve({}))
    clients.identify(grid)
    for node in (1, 2, 3):
        message = clients._query(node, {})
        context = Context(0, node, configs.get(node, {}), RecordDict(), {})
        names.append(app(message, context).content["properties"]["client"])
    assert names == ["pi-1", "other", "000004"]


def test_registered_names_outlast_an_absence() -> None:
    clients, names = Clients(), {1: "a", 2: "b", 3: "c"}

    def seen(registered: dict[int, str]) -> list[object]:
        grid = Named(dict.fromkeys(registered, b""), names, registered)
        clients._ask(list(registered), grid)
        return [clients.config(n, 1).get("registered-name") for n in (1, 2, 3)]

    assert seen({1: "pi-1", 2: "pi-2"}) == ["pi-1", "pi-2", None]
    # Node 1 is away while node 3 is queried.
    assert seen({2: "pi-2", 3: ""}) == ["pi-1", "pi-2", None]


def test_client_refused_for_its_model_is_asked_again():
    structures = {1: "other"}
    grid = grid_of(3, properties_of(structure=structures))
    strategy = averaging()
    assert strategy._identify(grid) == [1, 3]
    strategy._run.clients.acknowledge({"000000": 1}, 1)
    assert strategy._identify(grid) == [1, 3]
    structures.clear()
    # It is skipped a few times.
    assert [1, 2, 3] in [strategy._identify(grid) for _ in range(4)]
    assert strategy._run.clients.name_of(2) == "000001"
