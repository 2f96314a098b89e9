"""Parts of a round that `speed` measures: training, FLUTE's step, compression."""

import time
import timeit
import tracemalloc
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from flwr_frl.common.settings import Settings, build
from flwr_frl.strategies import FLUTE
from flwr_frl.task.compression.per_tensor import COMPRESSORS, create
from flwr_frl.task.models import SplitModel, build_model
from flwr_frl.task.tasks import build_task
from flwr_frl.task.training import SGD, train


def head_epochs(settings: Settings, epochs: int) -> dict[str, float]:
    """Return seconds of head epochs with features computed in each epoch or once."""
    task = build_task(settings, int(settings["num-clients"]))
    model = task.initial_model()
    sgd = build(SGD, settings)
    augmented = task.train_examples(0)

    def seconds(action: Callable[[], object]) -> float:
        action()
        began = time.perf_counter()
        action()
        return time.perf_counter() - began

    plain = augmented.without_augmentation()
    each = seconds(lambda: train(model, "head", augmented, task.loss, epochs, sgd))
    once = seconds(lambda: train(model, "head", plain, task.loss, epochs, sgd))
    representation = seconds(
        lambda: train(model, "representation", augmented, task.loss, 1, sgd)
    )
    return {"each": each, "once": once, "representation": representation}


def formats(shape: tuple[int, ...]) -> dict[str, float]:
    """Return milliseconds of a training step of 10 images by memory format and type."""
    results = {}
    for name, memory, bfloat16 in (
        ("contiguous", torch.contiguous_format, False),
        ("channels last", torch.channels_last, False),
        ("channels last, bfloat16", torch.channels_last, True),
    ):
        model = build_model("cifar10-cnn", shape, 10).to(memory_format=memory)
        images = torch.randn(10, *shape).to(memory_format=memory)
        targets = torch.randint(0, 10, (10,))
        optimizer = SGD().optimizer(model)

        def step(
            model: SplitModel = model,
            images: Tensor = images,
            optimizer: torch.optim.Optimizer = optimizer,
            bfloat16: bool = bfloat16,
            targets: Tensor = targets,
        ) -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                loss = torch.nn.functional.cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()

        for _ in range(20):
            step()
        began = time.perf_counter()
        for _ in range(200):
            step()
        results[name] = (time.perf_counter() - began) / 200 * 1000
    return results


def flute_server(clients: int, classes: int, features: int) -> dict[str, float]:
    """Return ms of FLUTE's step on 100 heads, and MB of all clients' heads."""
    strategy = FLUTE()
    rng = np.random.default_rng(0)
    heads = rng.standard_normal((100, classes, features), dtype=np.float32)
    owned = rng.random((100, classes)) < 0.2
    strategy.improve(heads, owned)
    began = time.perf_counter()
    for _ in range(10):
        strategy.improve(heads, owned)
    milliseconds = (time.perf_counter() - began) * 100
    tracemalloc.start()
    for i in range(clients):
        strategy.heads[str(i)] = {
            "head.weight": heads[i % 100].copy(),
            "head.bias": np.zeros(classes, np.float32),
        }
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    least = clients * 4 * (classes * features + classes)
    return {"step-ms": milliseconds, "held-mb": held / 1e6, "least-mb": least / 1e6}


def compressors(dimension: int) -> list[tuple[str, float, float, float]]:
    """Measure every operator and ``torch.topk`` on the same vector.

    Parameters
    ----------
    dimension : int
        Number of entries; 1 % of them are kept.

    Returns
    -------
    list of (str, float, float, float)
        Name, milliseconds to compress and to decompress (medians of 5), bytes; the
        first is ``torch.topk`` alone.
    """
    x = torch.randn(dimension, generator=torch.Generator().manual_seed(0))
    k = dimension // 100
    generator = np.random.default_rng(0)

    def median(action: Callable[[], object]) -> float:
        return sorted(timeit.repeat(action, number=1, repeat=5))[2] * 1000

    rows = [("torch.topk", median(lambda: x.abs().topk(k)), 0.0, 0.0)]
    for name in COMPRESSORS:
        options = {"k": k} if "top-k" in name or name == "rand-k" else {}
        operator = create(name, **options)
        data = operator.compress(x, generator)
        rows.append(
            (
                name,
                median(lambda c=operator: c.compress(x, generator)),
                median(lambda c=operator, d=data: c.decompress(d, dimension)),
                float(len(data)),
            )
        )
    return rows
