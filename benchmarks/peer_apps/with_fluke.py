"""fluke: its centralised federated averaging."""

from typing import Any

import torch
from fluke import FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from fluke.utils import FederationObserver

from benchmarks.peer_apps.work import (
    BATCH,
    CLIENTS,
    LEARNING_RATE,
    Counter,
    Job,
    read_client,
)


class JobServer(Server):
    """A server that samples the job's clients.

    Parameters
    ----------
    job : Job
        Job with the clients of each round.
    **base
        Arguments of fluke's server.
    """

    def __init__(self, job: Job, **base: Any) -> None:
        super().__init__(**base)
        self.coming = iter(job.sampled)

    def get_eligible_clients(self, eligible_perc: float) -> list[Client]:
        """Return the next round's clients."""
        return [self.clients[i] for i in next(self.coming)]


class Noting(FederationObserver):
    """Records the end of each round.

    Parameters
    ----------
    job : Job
        Job to which the notes belong.
    counter : Counter
        Counter of the clients' steps.
    """

    def __init__(self, job: Job, counter: Counter) -> None:
        self.job, self.counter = job, counter

    def end_round(self, round: int) -> None:
        """Record the end of a round."""
        self.job.note(self.counter.steps)


def clients_of(job: Job) -> list[Client]:
    """Return all clients, with their examples in memory."""
    clients = []
    for i in range(CLIENTS):
        examples = FastDataLoader(
            *read_client(job.folder, i), num_labels=10, batch_size=BATCH, shuffle=True
        )
        sgd = OptimizerConfigurator({"name": "SGD", "lr": LEARNING_RATE})
        clients.append(
            Client(
                index=i,
                train_set=examples,
                test_set=None,
                optimizer_cfg=sgd,
                loss_fn=torch.nn.CrossEntropyLoss(),
                local_epochs=job.epochs,
            )
        )
    return clients


def main() -> None:
    """Carry out the job."""
    job, counter = Job.read(), Counter().watch()
    FlukeENV().set_seed(0)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    model, clients = job.initial_model(), clients_of(job)
    server = JobServer(job, model=model, test_set=None, clients=clients)
    run = CentralizedFL(CLIENTS, None, {}, clients=clients, server=server)
    run.set_callbacks([Noting(job, counter)])
    share = len(job.sampled[0]) / CLIENTS
    run.run(len(job.sampled), share)
    job.keep(server.model.parameters())


if __name__ == "__main__":
    main()
