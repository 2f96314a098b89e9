"""flwr-frl: the model and the images as a custom task, with a note per round."""

import sys
from typing import Annotated, Any

import torch
from flwr.app import ArrayRecord

from benchmarks.peer_apps.work import (
    BATCH,
    CLIENTS,
    CNN,
    LEARNING_RATE,
    Counter,
    Job,
    Softmax,
    read_client,
)
from flwr_frl import simulate
from flwr_frl.common.settings import resolve, setting
from flwr_frl.strategies import FedAvg, FedRep
from flwr_frl.task import ExampleSet, ExampleTask, build_task
from flwr_frl.task.training import sgd

SHARDS = 5


def images(data_dir: str) -> Any:
    """Return the image folder, split over clients, without augmentation."""
    settings = {
        "task": "image-folder",
        "data-dir": data_dir,
        "num-clients": CLIENTS,
        "classes-per-client": SHARDS,
        "augment": False,
    }
    return build_task(resolve(settings), CLIENTS)


def folder(
    num_clients: int, *, data_dir: Annotated[str, setting(form="a directory")] = ""
) -> ExampleTask:
    """Return the task: the image folder with PFLlib's CNN."""
    data = images(data_dir)
    return ExampleTask(
        model=CNN,
        head="fc",
        train=[data.train_examples(i) for i in range(num_clients)],
        test=[data.test_examples(i) for i in range(num_clients)],
        classes=data.classes,
    )


def vectors(num_clients: int) -> ExampleTask:
    """Return the task of softmax regression, whose examples are in memory."""
    job = Job.read()
    train = [ExampleSet(*read_client(job.folder, i)) for i in range(num_clients)]
    classes = tuple(map(str, range(10)))
    return ExampleTask(
        model=Softmax, head="fc", train=train, test=train, classes=classes
    )


class Noted:
    """A strategy that records each round's end, and saves the final model."""

    counter = Counter()
    job: Job | None = None

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        """Aggregate, and record the end of the round."""
        arrays, metrics = super().aggregate_train(server_round, replies)  # type: ignore[misc]
        Noted.job = Noted.job or Job.read()
        Noted.job.note(Noted.counter.steps)
        if server_round == len(Noted.job.sampled):
            Noted.job.keep(self._tensors(arrays))
        return arrays, metrics

    @staticmethod
    def _tensors(arrays: ArrayRecord) -> list[torch.Tensor]:
        return [torch.from_numpy(array.numpy()) for array in arrays.values()]


class NotedFedAvg(Noted, FedAvg):
    """FedAvg with notes."""


class NotedFedRep(Noted, FedRep):
    """FedRep with notes."""


def count_steps() -> None:
    """Count the steps of local training in this process."""
    step = sgd.SGDOptimizer.step

    def counted(steps: sgd.SGDOptimizer) -> None:
        step(steps)
        Noted.counter.add()

    sgd.SGDOptimizer.step = counted  # type: ignore[method-assign]


def main(backend: str, cohort: str = "auto") -> None:
    """Carry out the job, inline or on Ray; cohort ``off`` trains clients one by one."""
    job = Job.read()
    cnn = job.model_name == "cnn"
    simulate(
        NotedFedRep if job.head_epochs else NotedFedAvg,
        backend,
        task=f"{__name__}:{'folder' if cnn else 'vectors'}",
        **({"data_dir": job.data_dir} if cnn else {}),
        clients=CLIENTS,
        fraction=len(job.sampled[0]) / CLIENTS,
        cohort=cohort,
        rounds=len(job.sampled),
        head_epochs=job.head_epochs,
        representation_epochs=job.epochs,
        batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        momentum=0.0,
        weight_decay=0.0,
        evaluate_every=0,
        evaluate_last=0,
    )


if __name__ == "__main__":
    # Workers import the module under this name.
    from benchmarks.peer_apps import ours

    ours.count_steps()
    ours.main(*sys.argv[1:])
