"""Early stopping and the best round's checkpoint, both by validation metrics."""

import json
import math
from pathlib import Path

import pytest
from flwr.app import Context, Message, MessageType, MetricRecord, RecordDict
from function_clients import grid_of, honest

from flwr_frl.common.checkpoint import BEST_FILE, FILE, read
from flwr_frl.common.settings import resolve
from flwr_frl.results.results import best_round, read_rows
from flwr_frl.strategies.server_app import serve

# Mean accuracies of rounds 1 to 8
ACCURACIES = [0.2, 0.4, 0.6, 0.5, 0.6, 0.3, 0.7, 0.8]
VALIDATION = {"validation-fraction": 0.1, "evaluate-on": "validation"}


def scripted(message: Message, context: Context) -> Message:
    """Reply to evaluations with the round's accuracy from `ACCURACIES`."""
    if message.metadata.message_type != MessageType.EVALUATE:
        return honest(message, context)
    server_round = int(message.content.config_records["config"]["server-round"])
    accuracy = ACCURACIES[server_round - 1]
    metrics = {"num-examples": 1, "loss": 1.0, "accuracy": accuracy}
    records = {"metrics": MetricRecord(metrics)}
    return Message(RecordDict(records), reply_to=message)


def go(output: Path, **settings) -> list[int]:
    """Run FedAvg, and return the rounds in its file of metrics."""
    names = {name.replace("_", "-"): value for name, value in settings.items()}
    usual = {"algorithm": "fedavg", "fraction-train": 1.0, "evaluate-every": 1}
    usual |= {"num-server-rounds": 8, "output": str(output), **VALIDATION}
    serve(grid_of(2, scripted), resolve({**usual, **names}))
    return [row["round"] for row in read_rows(output / "fedavg" / "metrics.jsonl")]


def round_of(path: Path) -> int:
    return read(path).about["round"]


def test_run_stops_after_patience_evaluations_without_improvement(tmp_path):
    # Rounds 4, 5 and 6 are no better than round 3.
    assert go(tmp_path, patience=3) == [1, 2, 3, 4, 5, 6]
    assert round_of(tmp_path / "fedavg" / FILE) == 6
    assert not (tmp_path / "fedavg" / BEST_FILE).exists()


def test_keep_best_saves_the_best_round_alongside_the_last(tmp_path):
    go(tmp_path, patience=3, keep_best=True)
    best, last = (read(tmp_path / "fedavg" / name) for name in (BEST_FILE, FILE))
    assert (best.about["round"], last.about["round"]) == (3, 6)
    # Each round adds the same value: 1.5, or 5/3 if examples are the weights.
    assert best.arrays["b"][0] * 2 == pytest.approx(last.arrays["b"][0])


def test_a_resumed_run_remembers_its_best_round(tmp_path):
    assert go(tmp_path, num_server_rounds=5) == [1, 2, 3, 4, 5]
    again = {"resume": str(tmp_path), "patience": 3, "keep_best": True}
    assert go(tmp_path, **again) == [1, 2, 3, 4, 5, 6]
    # Round 3 is still the best, but the first run did not keep its checkpoint.
    assert not (tmp_path / "fedavg" / BEST_FILE).exists()


@pytest.mark.parametrize("reported", [True, False])
def test_early_stopped_run_does_not_continue_when_it_is_resumed(tmp_path, reported):
    assert go(tmp_path, patience=3) == [1, 2, 3, 4, 5, 6]
    summary = tmp_path / "summary.json"
    results = json.loads(summary.read_text())["algorithms"]
    if not reported:
        # As if the run had been killed before it wrote its report.
        summary.unlink()
    assert go(tmp_path, patience=3, resume=str(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert json.loads(summary.read_text())["algorithms"] == results
    # With more patience it continues.
    assert go(tmp_path, patience=4, resume=str(tmp_path)) == [*range(1, 9)]


def test_best_round_is_kept_by_a_run_resumed_in_another_folder(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    go(first, num_server_rounds=5, keep_best=True)
    go(second, num_server_rounds=6, keep_best=True, resume=str(first))
    assert round_of(second / "fedavg" / BEST_FILE) == 3


def test_without_an_accuracy_the_lowest_loss_is_best():
    nan = math.nan
    pairs = [(3.0, nan), (1.0, nan), (2.0, None), (None, None)]
    rows = [
        {"round": i, "evaluated": 2, "loss": loss, "accuracy": accuracy}
        for i, (loss, accuracy) in enumerate(pairs, 1)
    ]
    assert best_round(rows) == (2, 2)
    assert best_round([*rows, {"round": 5, "loss": 0.0}]) == (2, 2)
    assert best_round([]) == (0, 0)
