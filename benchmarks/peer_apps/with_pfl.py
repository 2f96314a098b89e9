"""pfl-research: its federated averaging, simulated in one process."""

from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from benchmarks.peer_apps.work import BATCH, LEARNING_RATE, Counter, Job, read_client


def with_loss(model: torch.nn.Module) -> torch.nn.Module:
    """Add to a model the methods that pfl-research calls."""

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x), y)

    model.loss, model.metrics = loss, lambda *_: {}
    return model


class Noting(TrainingProcessCallback):
    """Records the end of each round.

    Parameters
    ----------
    job : Job
        Job to which the notes belong.
    counter : Counter
        Counter of all steps, including the server's.
    """

    def __init__(self, job: Job, counter: Counter) -> None:
        self.job, self.counter = job, counter

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Record the clients' steps; the server makes one step per round."""
        self.job.note(self.counter.steps - central_iteration - 1)
        return False, Metrics()


def main() -> None:
    """Carry out the job."""
    job, counter = Job.read(), Counter().watch()
    clients = (client for sampled in job.sampled for client in sampled)
    everybody = {client for sampled in job.sampled for client in sampled}
    users = {i: Dataset(read_client(job.folder, i)) for i in everybody}
    data = FederatedDataset(users.__getitem__, lambda: next(clients))
    model = with_loss(job.initial_model())
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=len(job.sampled),
            # Only round 0 is evaluated, which is not timed.
            evaluation_frequency=len(job.sampled),
            train_cohort_size=len(job.sampled[0]),
            val_cohort_size=None,
        ),
        SimulatedBackend(data, data),
        PyTorchModel(
            model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0)
        ),
        NNTrainHyperParams(
            local_batch_size=BATCH,
            local_num_epochs=job.epochs,
            local_learning_rate=LEARNING_RATE,
        ),
        callbacks=[Noting(job, counter)],
    )
    job.keep(model.parameters())


if __name__ == "__main__":
    main()
