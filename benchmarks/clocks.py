"""Runs on a simulated clock: accuracy by time, for SRPFL and asynchronous methods.

A synchronous method waits for all sampled clients, so that speeds and communication
times affect only its clock: one run serves all of them. Neither do communication times
affect which clients train with SRPFL and FLANP. A method that is tested before its
fine-tuning has the run of its ``-ft`` variant.
"""

import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runs import Job, carry_out, essential, finished
from flwr_frl.common.settings import Setting, resolve
from flwr_frl.results.results import METRICS, read_json, read_rows
from flwr_frl.strategies.algorithms import settings_owners
from flwr_frl.strategies.grids.speeds import SpeedModel
from flwr_frl.strategies.server.round import Participation

ASYNCHRONOUS = ("fedbuff", "fedasync")
PARTIAL = ("srpfl", "lg-srpfl", "flanp", "flanp-ft")
# Settings that affect only the clock of synchronous methods
CLOCK = (
    *("speed-model", "straggler-fraction", "initial-nodes", "rounds-per-stage"),
    *("concurrency", "buffer-size"),
)
Rows = list[dict[str, Any]]


def timed(settings: Mapping[str, Setting], place: Path) -> dict[str, Any]:
    """Carry out a run, or reuse one that differs only in its clock.

    Returns the final accuracy, costs, and the curve ``time``: times, accuracies and
    rounds of the tests. ``tested`` = ``"global"`` selects the accuracy before
    fine-tuning. Asynchronous rounds are as many as have the client updates of the
    synchronous ones.
    """
    own = dict(settings)
    tested = str(own.pop("tested", ""))
    algorithm = str(own["algorithm"])
    spent = float(own.get("communication-time", 0.0))
    sampled = round(float(own["fraction-train"]) * int(own["num-clients"]))
    if algorithm in ASYNCHRONOUS:
        per_version = int(own["buffer-size"]) if algorithm == "fedbuff" else 1
        for name in ("num-server-rounds", "evaluate-every"):
            own[name] = int(own[name]) * sampled // per_version
        own["concurrency"] = sampled
        if algorithm == "fedasync":
            del own["buffer-size"]
    else:
        own.pop("communication-time", None)
        left_out = CLOCK if algorithm not in PARTIAL else CLOCK[-2:]
        own = {n: v for n, v in own.items() if n not in left_out}
    if algorithm.endswith("-ft"):
        # The figures need a curve, not only the last round.
        kind = settings_owners(resolve({"algorithm": algorithm}))[-1]
        kind._traits = replace(kind._traits, evaluate_last_round_only=False)
    checksum = zlib.crc32(repr(sorted(essential(own).items())).encode())
    shared = place.parents[2] / "shared" / f"{algorithm}-{checksum:08x}"
    job = Job(shared, own, "")
    result = finished(job) or carry_out(job)
    if "failed" in result:
        raise RuntimeError(result["failed"])
    rows = read_rows(job.run_folder / METRICS)
    speeds = SpeedModel(
        str(settings["speed-model"]),
        int(own["num-clients"]),
        straggler_fraction=float(settings.get("straggler-fraction", 0.1)),
        seed=int(own["seed"]),
    )
    if algorithm not in (*ASYNCHRONOUS, *PARTIAL):
        fraction = float(own["fraction-train"])
        set_clock(rows, speeds, Participation(fraction, 1, int(own["seed"])))
    if algorithm not in ASYNCHRONOUS:
        for row in rows:
            row["seconds-simulated"] += spent * row["round"]
    metric = "accuracy-global" if tested else "accuracy"
    names = "seconds-simulated", metric, "round"
    points = [[row[name] for row in rows if metric in row] for name in names]
    return {
        "accuracy": points[1][-1],
        "time": rows[-1]["seconds-simulated"],
        "bytes": result.get("bytes"),
        "commit-of-run": result["commit"],
        "curve": {"time": points},
        **shares(rows, speeds, job),
    }


def set_clock(rows: Rows, speeds: SpeedModel, sampler: Participation) -> None:
    """Set the simulated clock of rounds that wait for all sampled clients."""
    seconds = 0.0
    for row in rows:
        asked = sampler.sample(row["round"], list(range(speeds.clients)))
        seconds += float(speeds.times(row["round"])[asked].max())
        row["seconds-simulated"] = seconds


def shares(rows: Rows, speeds: SpeedModel, job: Job) -> dict[str, float]:
    """Return the staleness of changes and the slowest tenth's share of the updates."""
    if "staleness-mean" not in rows[-1]:
        return {}
    clients = read_json(job.run_folder / "clients.json").values()
    updates = np.array([client["updates"] for client in clients])
    slow = np.argsort(speeds.times(1))[-max(1, speeds.clients // 10) :]
    return {
        "staleness": float(np.mean([row["staleness-mean"] for row in rows])),
        "share-of-slow-clients": float(updates[slow].sum() / updates.sum()),
    }
