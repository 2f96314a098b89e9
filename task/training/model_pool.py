"""Models to work with, one for each client that is at work in this process."""

import torch

from flwr_frl.task.devices import CPU, current
from flwr_frl.task.models.split_model import SplitModel
from flwr_frl.task.run_cache import TASKS_AT_A_TIME, run_object
from flwr_frl.task.training.cohort import current_client
from flwr_frl.task.types import Task


class ModelPool:
    """Models of the latest tasks and devices, by the client's place in its cohort."""

    def __init__(self) -> None:
        self.entries: list[tuple[Task, torch.device, dict[int, SplitModel]]] = []

    def get(self, task: Task, number: int) -> SplitModel:
        """Return a model on the device of this process."""
        device = current()
        entries = self.entries
        models = next((m for t, d, m in entries if t is task and d == device), None)
        if models is None:
            models = {}
            self.entries = [*entries[1 - TASKS_AT_A_TIME :], (task, device, models)]
        if number not in models:
            models[number] = task.initial_model().to(device)
        return models[number]


def scratch_model(task: Task) -> SplitModel:
    """Return a model with arbitrary content that no other client uses meanwhile.

    It is on the device of this process; the task's own model stays on the CPU.
    """
    client, is_on_cpu = current_client(), current() == CPU
    if client is not None and client.where_it_pays and is_on_cpu:
        client.is_alone |= task.scratch_model.is_large
    if is_on_cpu and (client is None or client.is_alone):
        return task.scratch_model
    return run_object(ModelPool).get(task, 0 if client is None else client.number)
