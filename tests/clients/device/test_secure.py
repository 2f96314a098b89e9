"""A device's distrust: what it refuses, by its node config and its memory."""

import subprocess
import sys

import pytest
from client_messages import app_of, context_of, device, initial_arrays, properties_of
from flwr.app import ConfigRecord, Context, Message, RecordDict
from refusals import code_of

from flwr_frl.clients.device.secure import Rules, answer, check_message, check_rules
from flwr_frl.clients.device.setup import check_names
from flwr_frl.clients.fedavg import FedAvgClient
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.secure.fixed_point import Plan
from flwr_frl.common.secure.messages import SECURE, SHORT, record_of, texts_in
from flwr_frl.common.secure.protocol import Coordinator
from flwr_frl.common.settings import build


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Files with three key pairs, and of all their public keys."""
    folder = tmp_path_factory.mktemp("keys")
    for i in range(3):
        path = str(folder / f"{i}.key")
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path]
        subprocess.run(command, check=True)
    public = [(folder / f"{i}.key.pub").read_text() for i in range(3)]
    (folder / "peers").write_text("\n".join(public))
    (folder / "text").write_text("no key")
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", str(folder / "ecdsa")]
    subprocess.run(command, check=True)
    return folder


@pytest.mark.parametrize(
    ("node", "code"),
    [
        ({"secure-aggregation": "yes"}, "secure-aggregation"),
        ({"secure-min-clients": 2}, "secure-min-clients"),
        ({"secure-min-clients": "3"}, "secure-min-clients"),
        ({"secure-key": "nowhere"}, "secure-key"),
        ({"secure-key": "text"}, "secure-key"),
        ({"secure-key": "ecdsa"}, "secure-key"),
        ({"secure-key": "0.key", "secure-peers": ""}, "secure-peers"),
        ({"secure-key": "0.key", "secure-peers": "ecdsa.pub"}, "secure-peers"),
        ({"secure-key": "0.key", "secure-peers": "text"}, "secure-peers"),
        ({"secure-peers": "peers"}, "secure-peers"),
    ],
)
def test_an_invalid_node_config_is_one_line(keys, monkeypatch, node, code):
    monkeypatch.chdir(keys)
    assert code_of(build, Rules, node) == code
    assert code_of(check_rules, node, {"secure-aggregation": True}) == code


def test_misspelt_names_are_refused():
    with pytest.raises(SettingsError):
        check_names({"secure-agregation": True}, FedAvgClient)


def test_a_device_takes_no_part_in_a_plain_run():
    context = device(secure_aggregation=True)
    properties = properties_of(app_of(algorithm="fedavg"), context)
    assert "secure-aggregation" in properties["refusal"]
    secured = app_of(algorithm="fedavg", secure_aggregation=True)
    assert "refusal" not in properties_of(secured, context)


def test_a_device_sends_no_plain_arrays():
    app = app_of(algorithm="fedavg", secure_aggregation=True)
    arrays = initial_arrays(app, context_of())
    message = Message(
        RecordDict({"arrays": arrays, "config": ConfigRecord()}), 1, "train"
    )
    required = context_of(secure_aggregation=True)
    query = Message(RecordDict({"config": ConfigRecord()}), 1, "query.statistics")
    assert code_of(app, message, required) == "secure-round"
    assert code_of(app, query, required) == "secure-round"
    app(message, context_of())


# A session of three devices, without training


class Session:
    def __init__(self, nodes: list[dict], threshold: int = 3) -> None:
        self.server = Coordinator(3, 0.67)
        self.plan = Plan(threshold, 32, 8.0, 3)
        self.contexts = {
            i: Context(1, i, node, RecordDict(), {}) for i, node in enumerate(nodes, 1)
        }

    def send(self, step: str, node: int, texts: dict[int, bytes]) -> dict[int, bytes]:
        session = self.server.session
        message = Message(
            RecordDict({SECURE: record_of(step, session, texts)}), node, SHORT
        )
        replied = answer(message, self.contexts[node]).content[SECURE]
        return texts_in(replied, step, session)

    def keys(self) -> dict[int, dict[int, bytes]]:
        plan = self.plan.text.encode()
        sent = {i: self.send("keys", i, {i: plan}) for i in self.contexts}
        return self.server.take_keys({i: keys[i] for i, keys in sent.items()})


def test_a_device_has_a_minimum_of_clients():
    session = Session([{"secure-min-clients": 4}, {}, {}])
    assert code_of(session.keys) == "secure-round"


def test_keys_are_signed(keys):
    nodes = [
        {"secure-key": str(keys / f"{i}.key"), "secure-peers": str(keys / "peers")}
        for i in range(3)
    ]
    session = Session(nodes)
    assert len(session.send("shares", 1, session.keys()[1])) == 3
    # One key is not signed.
    session = Session([*nodes[:2], {}])
    of_1 = session.keys()[1]
    assert code_of(session.send, "shares", 1, of_1) == "secure-round"


def test_steps_of_other_sessions_and_unknown_steps_are_refused():
    session = Session([{}, {}, {}])
    groups = session.keys()
    for step in ("masked", "none"):
        assert code_of(session.send, step, 1, groups[1]) == "secure-round"
    session.server.session = b"another"
    assert code_of(session.send, "shares", 1, groups[1]) == "secure-round"
    message = Message(RecordDict(), 1, SHORT)
    assert code_of(answer, message, session.contexts[1]) == "secure-round"


def test_words_before_shares_are_refused():
    session = Session([{}, {}, {}])
    session.keys()
    record = record_of("masked", session.server.session, {})
    message = Message(RecordDict({SECURE: record}), 1, "train")
    assert code_of(check_message, message, session.contexts[1]) == "secure-round"


def test_short_steps_load_no_torch():
    code = """if True:
        import sys
        from flwr.app import Context, Message, RecordDict
        from flwr_frl.common.arrays import enter_run
        from flwr_frl.clients.client_app import app
        from flwr_frl.common.secure.fixed_point import Plan
        from flwr_frl.common.secure.messages import SECURE, SHORT, record_of
        enter_run()
        plan = Plan(3, 32, 8.0, 3).text.encode()
        record = record_of("keys", b"session", {7: plan})
        message = Message(RecordDict({SECURE: record}), 7, SHORT)
        reply = app(message, Context(1, 7, {}, RecordDict(), {}))
        print([*reply.content[SECURE]][2:], {"torch"} & set(sys.modules))
    """
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"{['7'.zfill(20)]} set()\n"
