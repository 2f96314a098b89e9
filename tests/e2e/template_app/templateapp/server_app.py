"""The ServerApp: Flower's FedAvg with centralized evaluation."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch.utils.data import DataLoader

from templateapp.task import Net, examples
from templateapp.task import test as test_fn

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context):
    """Run the strategy; return the result for tests."""
    fraction_evaluate: float = context.run_config["fraction-evaluate"]
    torch.manual_seed(0)
    strategy = FedAvg(fraction_evaluate=fraction_evaluate)
    return strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=global_evaluate,
    )


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the model on central data."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test_fn(net, DataLoader(examples(1000, 200), 50))
    return MetricRecord({"accuracy": accuracy, "loss": loss})
