"""Simulated runs of SRPFL."""

import algorithm_runs

from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.grids.speeds import SimulatedArrivals, SpeedModel


def settings_of(algorithm: str, **more):
    small = {"num_clients": 20, "fraction_train": 1.0, "num_server_rounds": 4}
    small |= {"speed_model": "fixed", "initial_nodes": 5, "model": "mlp-2"}
    small |= {"batch_size": 50, "evaluate_last": 1, "evaluate_every": 0}
    return algorithm_runs.settings_of(algorithm, **{**small, **more})


def recorded(grid: InlineGrid) -> list[list[int]]:
    """Return a list to which each round's training adds its clients."""
    trained, send = [], grid.send_and_receive

    def spy(messages, *, timeout=None):
        messages = list(messages)
        if messages and messages[0].metadata.message_type == "train":
            trained.append([m.metadata.dst_node_id - 1 for m in messages])
        return send(messages, timeout=timeout)

    grid.send_and_receive = spy
    return trained


def simulated(settings, strategy, clients: int = 20):
    inner = InlineGrid(make_app(settings), clients)
    speeds = SpeedModel("fixed", clients, communication_time=1.0)
    return inner, SimulatedArrivals(inner, speeds, lambda n: n - 1)
