"""The log line of each round, and the status file that the page reads."""

import json
import logging

import pytest
from flwr.app import ArrayRecord, MessageType
from function_clients import averaging, grid_of, honest
from participants import properties_of

from flwr_frl.common.settings import build
from flwr_frl.common.text import several
from flwr_frl.results.report import Report
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server.checkpoint import Checkpoint, State
from flwr_frl.strategies.server.loop import Loop
from flwr_frl.strategies.server.run_settings import RunSettings
from flwr_frl.strategies.server_app import serve, server_settings


def test_long_lists_of_names_are_shortened():
    assert several(["a", "b"]) == "a, b"
    assert several(list("abcdef")) == "a, b, c, d, e and 1 other"
    assert several([str(i) for i in range(1005)]) == "0, 1, 2, 3, 4 and 1,000 others"


def status_in(output) -> dict:
    return json.loads((output / "fedavg" / "status.json").read_text())


class Coming(InlineGrid):
    """Node 4 joins in round 2; in round 3, node 2 leaves and node 3 does not reply."""

    now = 0

    def get_node_ids(self):
        gone = {4} if self.now < 2 else {2} if self.now >= 3 else set()
        return [node for node in self.contexts if node not in gone]

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        kinds = {message.metadata.message_type for message in messages}
        if MessageType.EVALUATE in kinds:
            # Evaluation ends a round.
            self.now = int(messages[0].metadata.group_id) + 1
        return [
            reply
            for reply in replies
            if (reply.metadata.src_node_id, reply.metadata.message_type, self.now)
            != (3, MessageType.TRAIN, 3)
        ]


@pytest.fixture
def watched(tmp_path, caplog):
    """Run three rounds; return the log lines and the contents of ``status.json``."""
    caplog.set_level(logging.INFO, "flwr")
    settings = {"output": str(tmp_path), "num-server-rounds": 3, "fraction-train": 1.0}
    settings |= {"algorithm": "fedavg", "evaluate-every": 1}
    grid = Coming(honest, 4)
    grid.now = 1
    serve(grid, server_settings(settings))
    return caplog.messages, status_in(tmp_path)


def test_each_round_logs_one_line(watched, tmp_path):
    lines, _ = watched
    assert f"results are written to {tmp_path}/fedavg" in lines
    assert lines.index("waiting for 3 nodes to say who they are") > 0
    here = "000000 (node 1), 000001 (node 2), 000002 (node 3)"
    assert f"connected clients: {here}" in lines
    first, second, third = [line for line in lines if line.startswith("round ")]
    # Losses are 0, 1, 2 and 3 with 1, 2, 3 and 4 examples, so their weighted means are
    # 8 / 6, 20 / 10 and, for clients 0 and 3, 12 / 5. Accuracies are 0, 0.1, 0.2 and
    # 0.3.
    assert first == "round 1 of 3: 3 clients, train loss 1.333, accuracy 10.00%"
    assert second == (
        "round 2 of 3: 4 clients, train loss 2, accuracy 15.00%; "
        "joined: 000003 (node 4)"
    )
    assert third == (
        "round 3 of 3: 2 clients, train loss 2.4, accuracy 16.67%; left: 000001; "
        "no reply from 000002"
    )


class Owing(InlineGrid):
    """After the first call, node 3 owes a reply and is not available."""

    connected = frozenset({1, 2, 3})
    nodes = (1, 2, 3)

    def get_node_ids(self):
        available, self.nodes = self.nodes, (1, 2)
        return list(available)


def test_node_that_owes_a_reply_has_not_left(tmp_path, caplog):
    caplog.set_level(logging.INFO, "flwr")
    settings = {"output": str(tmp_path), "num-server-rounds": 3}
    strategy, report = averaging(), Report(server_settings(settings))
    options, grid = build(RunSettings, report.settings), Owing(honest, 3)
    start = Checkpoint(0, ArrayRecord(), State({}, {}), 0.0, {})
    loop = Loop(strategy, options, report, start, None)
    for server_round in (1, 2):
        strategy._identify(grid)
        loop._after_round(server_round, ArrayRecord(), {"clients": 2})
    assert strategy._run.clients.here == {1, 2}
    assert caplog.messages[-1] == "round 2 of 3: 2 clients"


def test_the_status_of_each_client(watched):
    _, status = watched
    assert status["state"] == "finished"
    assert status["devices"] is True
    assert status["settings"]["num-server-rounds"] == 3
    assert not {"tracker-uri", "resume"} & status["settings"].keys()
    by_name = {client.pop("client"): client for client in status["clients"]}
    assert list(by_name) == [f"00000{i}" for i in range(4)]
    assert [c["node"] for c in by_name.values()] == ["1", None, "3", "4"]
    assert [c["last-round"] for c in by_name.values()] == [3, 2, 2, 3]
    assert [c["num-examples"] for c in by_name.values()] == [1, 2, 3, 4]
    reasons = ["", "", "round 3: no reply", ""]
    assert [c["reason"] for c in by_name.values()] == reasons
    # The client that left was last seen before all others.
    assert by_name["000001"]["last-seen"] < by_name["000000"]["last-seen"]


@pytest.mark.parametrize(
    "place",
    ["flwr_frl.results.report.Report.add", "flwr_frl.strategies.server.loop.let_join"],
)
def test_status_of_an_interrupted_run_is_stopped(tmp_path, monkeypatch, place):
    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, stop)
    settings = {"output": str(tmp_path), "algorithm": "fedavg", "new-clients": 1}
    with pytest.raises(KeyboardInterrupt):
        serve(grid_of(3), server_settings({**settings, "num-server-rounds": 2}))
    assert status_in(tmp_path)["state"] == "stopped"


def test_a_refused_client_is_in_the_status(tmp_path):
    app = properties_of(refusal={1: "no folder <b>"})
    settings = {"output": str(tmp_path), "algorithm": "fedavg", "fraction-train": 1.0}
    serve(grid_of(3, app), server_settings({**settings, "num-server-rounds": 1}))
    status = status_in(tmp_path)
    (refused,) = [client for client in status["clients"] if client["node"] == "2"]
    assert refused["reason"] == "takes no part: no folder <b>"
    assert refused["last-round"] == 0
