"""Results folders, as the results page reads them."""

import json

ROWS = [
    {"round": 1, "seconds": 2.0, "train-loss": 2.0, "clients": 2, "rejected": 0}
    | {"bytes-down": 3_000_000, "bytes-up": 1_000_000, "accuracy": 0.25},
    {"round": 2, "seconds": 4.0, "train-loss": 1.0, "clients": 1, "rejected": 1}
    | {"bytes-down": 3_000_000, "bytes-up": 500_000, "accuracy": 0.75}
    | {"rejected-clients": ["pi-2"], "unanswered-clients": ["pi-3"]},
]


CLIENTS = [
    {"client": "pi-1", "node": "9007199254740993", "last-seen": 1.7e9, "last-round": 2}
    | {"num-examples": 1234, "num-test-examples": 5, "reason": ""},
    {"client": "pi-2", "node": None, "last-seen": 1.7e9, "last-round": 1}
    | {"num-examples": 7, "num-test-examples": 5, "reason": "is bad"},
]


def write(folder, name="fedrep", rows=ROWS, clients=CLIENTS, **status):
    directory = folder / name
    directory.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / "metrics.jsonl").write_text(lines)
    content = {"state": "running", "clients": clients, **status}
    (directory / "status.json").write_text(json.dumps(content))
