"""The server: Flower's FedAvg, which records the end of each round."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from benchmarks.peer_apps.work import Job

app = ServerApp()


class StepCounter:
    """Counts the steps of all clients."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, records: list, weighted_by: str) -> MetricRecord:
        """Add the steps in the replies of a round."""
        metrics = [r for record in records for r in record.metric_records.values()]
        self.count += sum(int(each["steps"]) for each in metrics)
        return MetricRecord({"steps": self.count})


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    job, steps = Job.read(), StepCounter()
    clients = int(context.run_config["clients"])

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        if server_round:
            job.note(steps.count)
        if server_round == len(job.sampled):
            job.keep(arrays.to_torch_state_dict().values())

    strategy = FedAvg(
        fraction_train=len(job.sampled[0]) / clients,
        fraction_evaluate=0.0,
        min_available_nodes=clients,
        train_metrics_aggr_fn=steps,
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(job.initial_model().state_dict()),
        num_rounds=len(job.sampled),
        evaluate_fn=evaluate,
    )
