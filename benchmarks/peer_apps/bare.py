"""The bare loop: plain PyTorch, without any federated learning library."""

import sys

import torch
from torch import Tensor, nn

from benchmarks.peer_apps.work import (
    BATCH,
    CNN,
    LEARNING_RATE,
    Counter,
    Job,
    Softmax,
    read_client,
)

Examples = tuple[Tensor, Tensor]


def train(
    model: CNN | Softmax, learns: list[nn.Parameter], examples: Examples, epochs: int
) -> None:
    """Train some of the parameters with SGD; the others are frozen."""
    model.requires_grad_(False)
    for parameter in learns:
        parameter.requires_grad_(True)
    optimizer = torch.optim.SGD(learns, lr=LEARNING_RATE)
    x, y = examples
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def load(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    """Overwrite parameters."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def fit(
    job: Job, model: CNN | Softmax, examples: Examples, head: list[nn.Parameter]
) -> None:
    """Train one client's model with FedRep or FedAvg."""
    base = [p for p in model.parameters() if all(p is not h for h in head)]
    if head:
        train(model, head, examples, job.head_epochs)
    train(model, base, examples, job.epochs)


def read_all(job: Job, channels_last: bool) -> dict[int, Examples]:
    """Return the examples of all clients that will be sampled."""
    clients = {client for sampled in job.sampled for client in sampled}
    data = {client: read_client(job.folder, client) for client in clients}
    if not channels_last:
        return data
    order = torch.channels_last
    return {i: (x.contiguous(memory_format=order), y) for i, (x, y) in data.items()}


def main(channels_last: bool) -> None:
    """Carry out the job."""
    job, counter = Job.read(), Counter().watch()
    data = read_all(job, channels_last)
    torch.manual_seed(0)
    model = job.initial_model()
    head = list(model.fc.parameters()) if job.head_epochs else []
    shared = list(model.parameters())[: -len(head) or None]
    state = [p.detach().clone() for p in shared]
    first = [p.detach().clone() for p in head]
    heads: dict[int, list[Tensor]] = {}
    for sampled in job.sampled:
        total = [torch.zeros_like(value) for value in state]
        for client in sampled:
            load(shared, state)
            load(head, heads.get(client, first))
            fit(job, model, data[client], head)
            heads[client] = [p.detach().clone() for p in head]
            for value, parameter in zip(total, shared, strict=True):
                value += parameter.detach()
        state = [value / len(sampled) for value in total]
        job.note(counter.steps)
    job.keep(state)


if __name__ == "__main__":
    main("channels-last" in sys.argv)
