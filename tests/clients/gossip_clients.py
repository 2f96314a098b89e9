"""Single gossip clients, and configs of the messages that they receive."""

import pytest
from client_messages import new_context
from named_tasks import dashed

from flwr_frl.clients.algorithms import client_class
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.common.settings import build, resolve
from flwr_frl.task.tasks import build_task

GOSSIP = ("dpsgd", "choco-sgd", "squarm-sgd")
by_algorithm = pytest.mark.parametrize("algorithm", GOSSIP)
# Config of a message without neighbours' data.
QUIET = {"exchanged-round": 0, "consensus-step": 0.5, "neighbour-weight": 2 / 3}


def settings_of(algorithm: str = "squarm-sgd", **more):
    usual = {"num-clients": 5, "head-layers": 1, "model": "softmax"}
    return resolve({**usual, "algorithm": algorithm, **dashed(more)})


def client_of(algorithm: str = "squarm-sgd", state=None, index=0, **more):
    settings = settings_of(algorithm, **more)
    state = PersonalState(new_context()) if state is None else state
    kind = client_class(settings)
    client_settings = build(kind._settings_type, settings)
    return kind(build_task(settings, 5), index, state, client_settings)


def received(algorithm: str = "squarm-sgd", **more):
    client = client_of(algorithm, **more)
    client._receive([], {})
    return client


def config_of(server_round: int, relayed=(), exchanged=None, **more):
    config = {**QUIET, "server-round": server_round, **more}
    config["exchanged-round"] = server_round - 1 if exchanged is None else exchanged
    names = ("rounds", "senders", "weights", "data")
    for name, values in zip(names, zip(*relayed, strict=True), strict=False):
        config[f"relayed-{name}"] = list(values)
    return config
