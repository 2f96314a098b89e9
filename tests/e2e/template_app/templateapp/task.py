"""The model, the data and the training loops of the app. Nothing is downloaded."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES, INPUTS = 4, 8


class Net(nn.Module):
    """Two layers; the second is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(INPUTS, 16)
        self.fc2 = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


def examples(seed: int, count: int) -> TensorDataset:
    """Draw noisy copies of one prototype per class."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, INPUTS, generator=generator)
    prototypes = 2 * torch.eye(CLASSES, INPUTS)
    return TensorDataset(prototypes[targets] + noise, targets)


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """Return the loaders of a partition; partitions differ in size."""
    torch.manual_seed(partition_id)
    train = examples(partition_id, 32 * (partition_id + 1))
    test = examples(num_partitions + partition_id, 40)
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def train(net, loader, epochs: int, lr: float) -> float:
    """Train in place; return the mean loss per batch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    total = 0.0
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


@torch.no_grad()
def test(net, loader) -> tuple[float, float]:
    """Return the mean loss per batch, and the accuracy."""
    total, right = 0.0, 0
    for inputs, targets in loader:
        outputs = net(inputs)
        total += nn.functional.cross_entropy(outputs, targets).item()
        right += int((outputs.argmax(1) == targets).sum())
    return total / len(loader), right / len(loader.dataset)
