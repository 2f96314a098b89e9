"""Choose where simulated clients train: in this process, or on all cores with Ray."""

import os
import time
from contextlib import suppress
from importlib.util import find_spec
from math import ceil

import torch

from flwr_frl.clients.algorithms import client_class
from flwr_frl.common.settings import Settings, declared
from flwr_frl.task.models.frozen import new_model
from flwr_frl.task.tasks import build_task
from flwr_frl.task.training.local_training import train
from flwr_frl.task.training.sgd import SGD

# Seconds that Ray takes to start and to end; 10 s on two cores
# (benchmarks/results/speed.md).
RAY_START = 15.0
# Seconds of CPU time that Ray adds to each training of a client.
RAY_CALL = 0.005
# Minimum speed-up of clients with small models that train together
# (benchmarks/results/cohort.md).
COHORT_GAIN = 3.0


def choose_backend(settings: Settings) -> str:
    """Return the backend with which a run is expected to finish first.

    Ray is chosen on a cluster (``RAY_ADDRESS``) and with several GPUs. Otherwise it is
    chosen if sharing the training of all rounds among the cores saves more than
    `RAY_START` seconds. The time of the training is estimated from a step that is
    measured once (`fit_seconds`), less if the clients train together. The choice
    changes the numbers of a run by rounding only.

    Parameters
    ----------
    settings : mapping
        All settings of the run.

    Returns
    -------
    {"inline", "ray"}
        Always ``inline`` if Ray is not installed, or if the algorithm or the task is
        defined in the script itself, which Ray's workers cannot import.
    """
    names = (str(settings["algorithm"]), str(settings["task"]))
    if find_spec("ray") is None or any(n.startswith("__main__:") for n in names):
        return "inline"
    device = str(settings["device"])
    gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if os.environ.get("RAY_ADDRESS") or gpus > 1:
        return "ray"
    cores = usable_cores()
    if cores == 1 or gpus or device not in ("auto", "cpu"):
        return "inline"
    # Seconds that a training of a client saves on Ray, with what its call costs.
    saved = fit_seconds(settings) * (1 - 1 / cores) - RAY_CALL / cores
    clients = float(settings["num-clients"]) * float(settings["fraction-train"])
    rounds = float(settings["num-server-rounds"])
    return "ray" if max(1.0, clients) * rounds * saved > RAY_START else "inline"


def usable_cores() -> int:
    """Return the number of cores that this process may use; of all on macOS."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fit_seconds(settings: Settings) -> float:
    """Return the estimated seconds of one client's training in a round, on one core.

    A training step of client 0 is measured. The result is 0 if it cannot train, which
    the run reports.
    """
    task = build_task(settings, int(settings["num-clients"]))
    # Training must not diverge, and its time does not depend on the learning rate.
    sgd = SGD(learning_rate=1e-30, batch_size=int(settings["batch-size"]))
    seconds = 0.0
    # The measurement must not affect the random numbers of the run.
    with torch.random.fork_rng(devices=[]), suppress(Exception):
        examples = task.train_examples(0)
        few = examples.sample(min(1.0, 2 * sgd.batch_size / len(examples)))
        model = new_model(task)
        # The first steps are slower, as they allocate memory.
        for _ in range(2):
            began = time.process_time()
            train(model, "all", few, task.loss, 1, sgd)
            step = (time.process_time() - began) / ceil(len(few) / sgd.batch_size)
        epochs = float(settings["representation-epochs"])
        # A step of the head alone has no backward pass through the representation.
        if "head-epochs" in declared(client_class(settings)._settings_type):
            epochs += float(settings["head-epochs"]) / 3
        seconds = step * epochs * ceil(len(examples) / sgd.batch_size)
    together = settings["cohort"] == "auto" and not task.scratch_model.is_large
    return seconds / COHORT_GAIN if together else seconds
