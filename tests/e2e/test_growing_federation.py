"""A device joins during a run; another is restarted between a stop and a resume.

The devices have no ``client-name``: each is known by its registered name.
"""

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from devices import write_folders
from federation import ROOT, Federation, read_lines, wait_until

NAMES = ("pi-1", "pi-2", "pi-3")
CONFIG = (
    'algorithm="fedrep" task="image-folder" model="mlp-2" num-clients=3 '
    "fraction-train=1.0 batch-size=6 augment=false head-epochs=1 evaluate-every=1 "
    "evaluate-last=1 checkpoint-every=1 names-by-key=true"
)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Federation]:
    write_folders(tmp_path / "data", len(NAMES))
    federation = Federation(tmp_path / "federation", NAMES)
    try:
        federation.start_superlink()
        federation.register()
        yield federation
    finally:
        federation.close()


def start(federation: Federation, name: str) -> None:
    home, i = federation.home.parent, NAMES.index(name)
    config = f'data-dir="{home / "data" / f"{i:06d}"}" state-dir="{home / name}"'
    federation.start_supernode(name, config)


def saved(federation: Federation, name: str) -> list[Path]:
    return sorted((federation.home.parent / name).rglob("*.safetensors"))


@pytest.mark.e2e
def test_a_device_joins_and_another_is_restarted_before_a_resume(
    started: Federation, tmp_path: Path
) -> None:
    output = tmp_path / "results"
    rows = output / "fedrep" / "metrics.jsonl"
    logs: list[str] = []
    for name in NAMES[:2]:
        start(started, name)

    def run() -> None:
        rounds = f'{CONFIG} num-server-rounds=200 output="{output}"'
        logs.append(started.run(ROOT, rounds, 900))

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: len(read_lines(rows)) > 0, 300, "the first round")
    start(started, NAMES[2])

    def all_train() -> bool:
        return any(row["clients"] == 3 for row in read_lines(rows))

    wait_until(all_train, 300, "the third device")
    [run_id] = set(re.findall(r"\b\d{15,20}\b", started.flwr("list", "test")))
    started.flwr("stop", run_id, "test")
    thread.join()
    before = read_lines(rows)
    assert before[0]["clients"] == 2
    # The directories of their states have the registered names.
    assert all(name in {p.parent.name for p in saved(started, name)} for name in NAMES)
    # Its new version begins as another process.
    process = started.processes.pop(NAMES[0])
    process.terminate()
    process.wait()
    start(started, NAMES[0])
    rounds = len(before) + 2
    resumed = f'{CONFIG} num-server-rounds={rounds} output="{output}" '
    resumed += f'resume="{output}" min-available-nodes=3'
    log = started.run(ROOT, resumed, 600)
    after = read_lines(rows)
    assert [row["round"] for row in after] == list(range(1, rounds + 1)), log
    assert after[-1]["clients"] == 3, log
    assert "has lost what it kept" not in log
