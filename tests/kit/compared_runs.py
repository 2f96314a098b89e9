"""Files of finished runs, for comparisons."""

import json
from pathlib import Path

from flwr_frl.common.settings import resolve
from flwr_frl.results.results import write_json

CLIENTS = [f"{i:06d}" for i in range(8)]
# Accuracies of eight clients with one seed. FedPer and FedRep differ in one of them.
FEDAVG = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
FEDREP = [0.2, 0.4, 0.5, 0.7, 0.9, 0.9, 0.9, 1.0]
FEDPER = [0.2, 0.4, 0.5, 0.7, 0.9, 0.9, 0.9, 0.9]


def write_runs(output: Path, seed=0, examples=10, rounds=4, **methods) -> Path:
    """Write the files of finished runs, whose last rounds are equal."""
    config = resolve({"seed": seed, "output": str(output)})
    for name, values in methods.items():
        of_clients = dict(zip(CLIENTS, values, strict=False))
        folder = output / name
        folder.mkdir(parents=True)
        lines = []
        for number in range(1, rounds + 1):
            # A round before the last ten is no part of the result.
            metrics = {
                c: {"accuracy": v * (number > rounds - 10)}
                for c, v in of_clients.items()
            }
            accuracy = sum(m["accuracy"] for m in metrics.values()) / len(metrics)
            row = {"round": number, "seconds": 2.0 * number, "accuracy": accuracy}
            row |= {"evaluated": len(metrics), "bytes-up": 10, "bytes-down": 20}
            lines.append(json.dumps({**row, "client-metrics": metrics}))
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        sizes = {"num-examples": examples, "num-test-examples": 5}
        write_json(folder / "clients.json", dict.fromkeys(of_clients, sizes))
        status = {"state": "finished", "settings": {**config, "algorithm": name}}
        write_json(folder / "status.json", status)
    content = {"algorithms": {key: {} for key in methods}, "config": dict(config)}
    write_json(output / "summary.json", content)
    return output


def with_seeds(output: Path, seeds: int, **methods) -> Path:
    """Write runs of several seeds; each has results that are 0.01 lower."""
    for seed in range(seeds):
        lower = {n: [v - 0.01 * seed for v in of] for n, of in methods.items()}
        write_runs(output / f"seed-{seed}", seed, **lower)
    config = dict(resolve({"output": str(output)}))
    content = {"algorithms": {key: {} for key in methods}, "config": config}
    write_json(output / "summary.json", {**content, "seeds": list(range(seeds))})
    return output
