"""A client that receives the model, trains it on its images, and returns it."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peer_apps.work import BATCH, LEARNING_RATE, Job, read_client

app = ClientApp()


def fit(model: torch.nn.Module, batches: DataLoader, epochs: int) -> int:
    """Train a model; return the number of steps."""
    sgd = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model.train()
    for _ in range(epochs):
        for images, classes in batches:
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(model(images), classes).backward()
            sgd.step()
    return epochs * len(batches)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Reply with the trained model."""
    job = Job.read()
    model = job.initial_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client = int(context.node_config["partition-id"])
    examples = TensorDataset(*read_client(job.folder, client))
    steps = fit(model, DataLoader(examples, BATCH, shuffle=True), job.epochs)
    metrics = MetricRecord({"num-examples": len(examples), "steps": steps})
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    return Message(content=RecordDict(content), reply_to=message)
