"""Frozen parts are never sent, never trained, and identical on all devices."""

import json
from pathlib import Path
from typing import Any

import inline_runs
import pytest
import torch
from flwr.app import Context, Message
from frozen_tasks import FROZEN_BYTES, frozen
from refusals import code_of

from flwr_frl.clients.base import Client
from flwr_frl.clients.client_app import make_app
from flwr_frl.common.messages import FROZEN_DIGEST
from flwr_frl.predict import load_run
from flwr_frl.strategies.grids.simulation import InlineGrid
from flwr_frl.strategies.server_app import serve

N = 5


def settings_of(task: str, folder: Path, **more: Any) -> dict[str, Any]:
    usual = {"algorithm": "fedavg", "num-server-rounds": 2, "fraction-train": 1.0}
    usual |= {"evaluate-every": 1, "batch-size": 4, "cohort": "off"}
    usual |= {"weight-decay": 0.1, "num-clients": N, "output": str(folder)}
    return inline_runs.settings_of(usual, task=f"frozen_tasks:{task}", **more)


def rows_of(task: str, folder: Path, **more: Any) -> list[dict[str, Any]]:
    return inline_runs.rows_of(settings_of(task, folder, **more))


@pytest.mark.parametrize("algorithm", ["fedavg", "fedrep", "fedprox", "scaffold"])
def test_losses_equal_those_of_a_run_that_sends_the_frozen_part(
    algorithm: str, tmp_path: Path
) -> None:
    kept = rows_of("frozen", tmp_path / "kept", algorithm=algorithm)
    sent = rows_of("buffered", tmp_path / "sent", algorithm=algorithm)
    for mine, theirs in zip(kept, sent, strict=True):
        for name in ("train-loss", "loss", "accuracy"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-6)
        # Two arrays of the layer, each with its name and an .npy header
        names = len("representation.0.weight") + len("representation.0.bias")
        each = FROZEN_BYTES + 2 * 128 + names
        assert theirs["bytes-up"] - mine["bytes-up"] == N * each
        assert theirs["bytes-down"] - mine["bytes-down"] == N * each


def test_cohort_with_a_frozen_part_matches_sequential_training(tmp_path: Path) -> None:
    alone = rows_of("frozen", tmp_path / "alone")
    together = rows_of("frozen", tmp_path / "together", cohort="5")
    for one, other in zip(alone, together, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["bytes-up"] == other["bytes-up"]


@pytest.mark.parametrize("algorithm", ["fedavg", "ifca", "fedfomo", "choco-sgd"])
def test_client_with_another_frozen_part_is_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, algorithm: str
) -> None:
    settings = settings_of("frozen", tmp_path, algorithm=algorithm)
    usual = make_app(settings)
    different = settings_of("differently_frozen", tmp_path, algorithm=algorithm)
    other = make_app(different)

    def answer(message: Message, context: Context) -> Message:
        app = other if context.node_config["partition-id"] == 3 else usual
        return app(message, context)

    serve(InlineGrid(answer, N), settings)  # type: ignore[arg-type]
    refusals = {m for m in caplog.messages if "takes no part" in m}
    (refusal,) = refusals
    assert "client 000003" in refusal
    assert "frozen part" in refusal
    lines = (tmp_path / algorithm / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["clients"] for line in lines] == [N - 1] * 2


def test_loaded_models_have_the_frozen_part(tmp_path: Path) -> None:
    rows_of("frozen", tmp_path, algorithm="fedrep", checkpoint_every=1)
    task = "frozen_tasks:frozen"
    predictor = load_run(tmp_path / "fedrep", "000001", task=task)
    model = predictor.model
    layer = frozen().initial_model().representation[0]
    torch.testing.assert_close(model.representation[0].weight, layer.weight.data)
    examples = frozen().test_examples(1)
    with torch.no_grad():
        outputs = model(examples.inputs)
    metrics = json.loads((tmp_path / "fedrep" / "clients.json").read_text())["000001"]
    accuracy = (outputs.argmax(1) == examples.targets).double().mean().item()
    assert accuracy == pytest.approx(metrics["accuracy"])


def test_a_run_is_not_loaded_with_another_frozen_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_of("frozen", tmp_path)
    other = {FROZEN_DIGEST: "0123456789abcdef"}
    monkeypatch.setattr(Client, "_about_frozen", lambda self: other)
    call = (load_run, tmp_path / "fedavg")
    assert code_of(*call, task="frozen_tasks:frozen") == "weights"
