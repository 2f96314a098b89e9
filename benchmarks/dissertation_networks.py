"""Multi-task optimisation and representation transfer with networks and real clients.

The dissertation studies both with convex problems and linear models, and leaves
networks to future work (sections 4.6 and 5.6). Here twelve people's handwritten digits
train the small CNN of `benchmarks.natural_tasks.writers`. Step sizes are chosen on
validation sets, a quarter of each client's training examples, with a separate seed.
Finished runs in ``--output`` are not repeated.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import RESULTS, markdown, write
from benchmarks.runs import Job, carry_out_all, exit_status, finished
from flwr_frl.common.settings import Setting
from flwr_frl.common.text import short_name
from flwr_frl.results.results import read_json

WRITERS, SOURCES, SEEDS, TUNING_SEED = 12, 8, 3, 1000
ITERATIONS = 400
NAME = "dissertation_networks"
COMMON: dict[str, Setting] = {
    "task": "benchmarks.natural_tasks:writers",
    "num-clients": WRITERS,
    "batch-size": 16,
    "evaluate-every": 0,
    "evaluate-last": 1,
}
GOSSIP: dict[str, Setting] = {"num-server-rounds": ITERATIONS, "momentum": 0.0}
MULTI_TASK: dict[str, Setting] = {
    "num-server-rounds": ITERATIONS,
    "compressor": "identity",
    "dual-regularizer": "1",
}
TRANSFER: dict[str, Setting] = {
    "num-server-rounds": 2,
    "num-sources": SOURCES,
    "source-epochs": 20,
    "head-epochs": 20,
}


class Row(NamedTuple):
    """A row of a table: its text, algorithm, settings and step sizes to choose from."""

    text: str
    algorithm: str
    settings: dict[str, Setting]
    steps: tuple[float, ...]

    @property
    def step(self) -> str:
        """The setting of the step size."""
        return "saddle-step" if self.algorithm == "multi-task" else "learning-rate"


def bounded(bound: float, text: str = "", **further: Setting) -> Row:
    """Return a row of multi-task optimisation with a bound b."""
    settings = {**MULTI_TASK, "constraint-bound": bound}
    settings |= {name.replace("_", "-"): value for name, value in further.items()}
    return Row(text or f"`multi-task`, b = {bound:g}", "multi-task", settings, STEPS)


STEPS = (0.05, 0.1, 0.2, 0.4)
UNBOUNDED = 1e9
MULTI_TASK_ROWS = {
    "none": bounded(UNBOUNDED, "`multi-task` without a bound: every node alone"),
    "30": bounded(30.0),
    "10": bounded(10.0),
    "3": bounded(3.0),
    "1": bounded(1.0),
    "10-head": bounded(
        10.0, "`multi-task`, b = 10, heads only", constrained_part="head"
    ),
    "1-head": bounded(1.0, "`multi-task`, b = 1, heads only", constrained_part="head"),
    "10-sign": bounded(
        10.0, "`multi-task`, b = 10, SignTopK of a tenth", compressor="sign-top-k"
    ),
    "dpsgd": Row("`dpsgd`: one common model", "dpsgd", GOSSIP, STEPS),
}
RATES = (0.02, 0.05, 0.2)
TRANSFER_ROWS = {
    "local": Row(
        "`local`: from scratch",
        "local",
        {"num-server-rounds": 20, "fraction-train": 1.0},
        RATES,
    ),
    "phase-1": Row("phase 1", "representation-transfer", TRANSFER, RATES),
    "phase-2": Row(
        "phases 1 and 2, half of the examples each",
        "representation-transfer",
        {**TRANSFER, "phase-two-epochs": 20},
        RATES,
    ),
}
ROWS = {**MULTI_TASK_ROWS, **TRANSFER_ROWS}


class Runs:
    """The runs of all rows."""

    def __init__(self, data_dir: Path, output: Path) -> None:
        self.data_dir, self.output = str(data_dir.absolute()), output.absolute()

    def job(self, name: str, step: float, seed: int) -> Job:
        """Return a run; with the tuning seed, it is evaluated on validation sets."""
        row = ROWS[name]
        settings = {**COMMON, **row.settings, "data-dir": self.data_dir}
        settings |= {row.step: step, "seed": seed}
        if seed == TUNING_SEED:
            settings |= {"validation-fraction": 0.25, "evaluate-on": "validation"}
        return Job(self.output / name / f"{step}-{seed}", row.algorithm, settings)

    def accuracy(self, job: Job) -> float:
        """Return the mean over the tested clients in %, -inf if training diverged.

        For `TRANSFER_ROWS` these are the targets, the last clients.
        """
        result = finished(job)
        if result is None or "failed" in result:
            return -np.inf
        clients = read_json(job.place / short_name(job.algorithm) / "clients.json")
        names = sorted(clients)
        if job.place.parent.name in TRANSFER_ROWS:
            names = names[SOURCES - WRITERS :]
        # The reply of a client whose model has diverged is rejected.
        accuracies = [clients[name].get("accuracy", -np.inf) for name in names]
        return 100 * float(np.mean(accuracies))

    def chosen(self, name: str) -> float:
        """Return the step size with the best accuracy on the validation sets.

        Step sizes with which a run diverged, with any seed, are excluded.
        """
        steps = ROWS[name].steps
        scores = [self.accuracy(self.job(name, step, TUNING_SEED)) for step in steps]
        for i, step in enumerate(steps):
            jobs = (self.job(name, step, seed) for seed in range(SEEDS))
            if any(finished(j) and np.isinf(self.accuracy(j)) for j in jobs):
                scores[i] = -np.inf
        return steps[int(np.argmax(scores))]

    def missing(self) -> list[Job]:
        """Return the runs that are not finished: first those of tuning."""
        missing = []
        for name, row in ROWS.items():
            jobs = [self.job(name, step, TUNING_SEED) for step in row.steps]
            if all(finished(job) is not None for job in jobs):
                step = self.chosen(name)
                jobs += [self.job(name, step, seed) for seed in range(SEEDS)]
            missing += [job for job in jobs if finished(job) is None]
        return missing

    def measured(self, name: str) -> dict[str, Any]:
        """Return a row's step size and its figures by seed."""
        step = self.chosen(name)
        jobs = [self.job(name, step, seed) for seed in range(SEEDS)]
        results = [finished(job) or {} for job in jobs]
        return {
            "step": step,
            "accuracy": [self.accuracy(job) for job in jobs],
            "constraint": [r["constraint"] for r in results if "constraint" in r],
            "bytes": [r.get("bytes") for r in results],
            "cpu-seconds": sum(r.get("cpu-seconds", 0.0) for r in results),
        }

    def write(self) -> None:
        """Write the page of all rows."""
        data: dict[str, Any] = {name: self.measured(name) for name in ROWS}
        plot(data)
        seconds = sum(row["cpu-seconds"] for row in data.values())
        title = "The dissertation's algorithms with networks"
        write(NAME, title, body(data), {"rows": data, "seconds": seconds})


def spread(values: list[float]) -> str:
    """Return mean ± standard deviation over the seeds."""
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}"


def body(data: Mapping[str, Any]) -> str:
    """Return the page below its heading."""
    table = []
    for name, row in MULTI_TASK_ROWS.items():
        found = data[name]
        bound = row.settings.get("constraint-bound", UNBOUNDED)
        largest = ""
        if bound != UNBOUNDED:
            largest = f"{np.mean(found['constraint']) + float(bound):.2f}"
        accuracy, megabytes = spread(found["accuracy"]), np.mean(found["bytes"]) / 1e6
        cells = (row.text, accuracy, largest, f"{megabytes:.0f}", f"{found['step']:g}")
        table.append(cells)
    heads = ("method", "accuracy (%)", "largest ‖θ_i - θ_j‖²", "MB", "step size")
    transfer = [
        (row.text, spread(data[name]["accuracy"]), f"{data[name]['step']:g}")
        for name, row in TRANSFER_ROWS.items()
    ]
    return (
        f"{WRITERS} writers of FEMNIST's digits, each with own training and test "
        "images, and a CNN of two convolutions and two linear layers. The theorems of "
        "the dissertation are for convex problems (chapter 4) and linear models "
        "(chapter 5), and networks are among its open questions. Accuracy is the mean "
        "over the clients, each tested with its own model, ± standard deviation over "
        f"{SEEDS} seeds. Step sizes are the best of {', '.join(map(str, STEPS))} and, "
        f"for the second table, of {', '.join(map(str, RATES))} on validation sets "
        "with a separate seed; those with which a run diverged are excluded.\n\n"
        "## Multi-task optimisation\n\n"
        f"The writers form a ring, and neighbours' models may differ by "
        f"‖θ_i - θ_j‖² ≤ b. {ITERATIONS} iterations with 16 images, without momentum; "
        "messages are not compressed unless noted. The largest distance is that after "
        "the last iteration; the constraint holds for averages over iterations in "
        f"theory.\n\n{markdown(heads, table)}\n![accuracy by bound]({NAME}.png)\n\n"
        "## Representation transfer\n\n"
        f"{SOURCES} writers are sources, the other {WRITERS - SOURCES} are targets, "
        "whose accuracy is shown. Sources train for 20 epochs. A target trains a head "
        "on their combined features (phase 1, 20 epochs), and then, on other images, "
        f"the whole model (phase 2, 20 epochs); `local` trains for 20 epochs.\n\n"
        f"{markdown(('method', 'accuracy of the targets (%)', 'step size'), transfer)}"
    )


def plot(data: Mapping[str, Any]) -> None:
    """Draw the accuracy by the bound, between separate and common models."""
    from matplotlib.figure import Figure

    names = ("dpsgd", "1", "3", "10", "30", "none")
    labels = ("D-PSGD:\none model", "b = 1", "b = 3", "b = 10", "b = 30", "no bound")
    values = [data[name]["accuracy"] for name in names]
    figure = Figure(figsize=(6.5, 3.4), layout="constrained")
    axes = figure.subplots()
    means, deviations = np.mean(values, axis=1), np.std(values, axis=1, ddof=1)
    axes.errorbar(range(len(names)), means, yerr=deviations, fmt="o-", capsize=3)
    axes.set_xticks(range(len(names)), labels)
    axes.set(ylabel="accuracy (%), mean over writers", title="Multi-task, 12 writers")
    axes.grid(alpha=0.3)
    figure.savefig(RESULTS / f"{NAME}.png", dpi=120)


def main() -> int:
    """Make the runs that are missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True, help="folder with `femnist`")
    parser.add_argument("--output", default=f"results/{NAME}")
    arguments = parser.parse_args()
    runs = Runs(Path(arguments.data_dir), Path(arguments.output))

    def make() -> None:
        # The chosen step sizes are known once the runs of tuning have finished.
        while missing := runs.missing():
            carry_out_all("networks", missing)
        runs.write()

    return exit_status(make)


if __name__ == "__main__":
    raise SystemExit(main())
