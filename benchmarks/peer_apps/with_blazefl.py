"""BlazeFL: FedAvg of its ``contrib``, one client at a time or in two processes."""

import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from blazefl.contrib import (
    FedAvgBaseClientTrainer,
    FedAvgBaseServerHandler,
    FedAvgProcessPoolClientTrainer,
)
from blazefl.core import IPCMode
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peer_apps.work import (
    BATCH,
    CLIENTS,
    CNN,
    LEARNING_RATE,
    Job,
    Softmax,
    read_client,
)


class Name(StrEnum):
    """The available models."""

    CNN = "cnn"


class Models:
    """Selects the only model."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def select_model(self, model_name: str) -> CNN | Softmax:
        """Return the initial model."""
        return self.job.initial_model()


class Clients:
    """The examples of each client, read on demand."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def get_dataset(self, type_: str, cid: int | None) -> TensorDataset:
        """Return a client's examples."""
        assert cid is not None
        return TensorDataset(*read_client(self.folder, cid))

    def set_dataset(self, type_: str, cid: int | None, dataset: Any) -> None:
        """Do nothing, because data sets do not change."""

    def get_dataloader(
        self,
        type_: str,
        cid: int | None,
        batch_size: int | None,
        generator: torch.Generator | None,
    ) -> Any:
        """Return a client's examples in shuffled batches."""
        examples = self.get_dataset(type_, cid)
        return DataLoader(
            examples, batch_size=batch_size, shuffle=True, generator=generator
        )


def trainer(how: str, common: dict[str, Any], epochs: int, home: Path) -> Any:
    """Return a trainer of the clients: ``one`` by one, or in two ``processes``."""
    options = {**common, "num_clients": CLIENTS, "epochs": epochs, "lr": LEARNING_RATE}
    if how == "one":
        return FedAvgBaseClientTrainer(**options)
    # The first optimizer of a process loads torch's compiler, which takes more than a
    # second. Creating one here loads it before the processes of each round are forked.
    model = common["model_selector"].select_model("")
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return FedAvgProcessPoolClientTrainer(
        **options,
        num_parallels=2,
        share_dir=home / "share",
        state_dir=home / "state",
        ipc_mode=IPCMode.SHARED_MEMORY,
    )


def run(job: Job, how: str, home: Path) -> None:
    """Carry out the job."""
    common = {
        "model_selector": Models(job),
        "model_name": Name.CNN,
        "dataset": Clients(job.folder),
        "device": "cpu",
        "batch_size": BATCH,
        "seed": 0,
    }
    server = FedAvgBaseServerHandler(
        **common,
        global_round=len(job.sampled),
        num_clients=CLIENTS,
        sample_ratio=len(job.sampled[0]) / CLIENTS,
    )
    clients = trainer(how, common, job.epochs, home)
    steps = 0
    for sampled in job.sampled:
        clients.local_process(server.downlink_package(), sampled)
        for package in clients.uplink_package():
            steps += package.data_size // BATCH
            server.load(package)
        job.note(steps)
    job.keep(server.model.parameters())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run(Job.read(), sys.argv[1], Path(folder))
