"""Accuracy under Byzantine clients, by algorithm, data, aggregation rule and attack.

Ten clients train on the bundled digits. The first three of them attack together and
know everything that the honest clients send (`benchmarks.attacks`). The other seven
test the models that they would use, on their own test data.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord

from benchmarks.attacks import (
    ATTACKERS,
    BACKDOOR,
    CLIENTS,
    FLIP,
    HIDDEN,
    AttackedGrid,
    is_attacker,
)
from benchmarks.backdoor import BackdoorDigits
from benchmarks.runs import Rounds
from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import Setting, resolve
from flwr_frl.strategies.grids.simulation import InlineGrid

POISONED = (FLIP, BACKDOOR, HIDDEN)


def run(given: Mapping[str, Setting], place: Path) -> dict[str, Any]:
    """Carry out a run with an ``attack``; without one, all clients are honest.

    Returns means over the honest clients and the ``last`` rounds: the accuracy on clean
    digits, and the ``success``, the share of triggered digits of other classes that are
    classified as the target.
    """
    own = dict(given)
    attack, last = str(own.pop("attack")), int(own.pop("last"))
    rounds = int(own["num-server-rounds"])
    settings = resolve(
        {
            **own,
            "task": "benchmarks.backdoor:BackdoorDigits",
            "attackers": ATTACKERS if attack in POISONED else 0,
            "label-flip": attack == FLIP,
            "byzantine-fraction": ATTACKERS / CLIENTS,
            "num-clients": CLIENTS,
        },
        lambda _: [BackdoorDigits],
    )
    grid = AttackedGrid(make_app(settings), attack)
    # The same clients with triggered test data
    triggered = InlineGrid(make_app({**settings, "test-triggered": True}), CLIENTS)
    triggered.contexts = grid.contexts
    attacked = Rounds(settings, grid)
    ask = attacked.strategy.configure_evaluate
    clean: list[float] = []
    fooled: list[float] = []

    def test(on: InlineGrid, server_round: int, arrays: ArrayRecord) -> float:
        config = ConfigRecord()
        messages = list(ask(server_round, arrays, config, on))
        # A model that can no longer be tested counts as 0 % accurate.
        right = [
            float(reply.content.metric_records["metrics"].get("accuracy", 0.0))
            for reply in on.send_and_receive(messages)
            if reply.has_content() and not is_attacker(reply)
        ]
        return sum(right) / (CLIENTS - ATTACKERS)

    def after_round(r: int, arrays: ArrayRecord, metrics: dict[str, Any]) -> None:
        if r > rounds - last:
            clean.append(test(grid, r, arrays))
            if attack in ("", BACKDOOR, HIDDEN):
                fooled.append(test(triggered, r, arrays))

    attacked.run(rounds, after_round=after_round)
    return {"accuracy": fmean(clean), "success": fmean(fooled or [0.0])}


def worst(config: Any, results: Any) -> dict[str, Any]:
    """Return the lowest accuracy over all attacks in %, by cell."""
    table = [["cell", "no attack", "worst attack"]]
    for cell in config.cells:
        means = {
            row: 100 * fmean(run.get("accuracy", 0) for run in cells[cell])
            for row, cells in results.items()
            if cell in cells
        }
        if attacked := {row: means[row] for row in means if row != "none"}:
            lowest = min(attacked, key=lambda row: attacked[row])
            text = f"{attacked[lowest]:.1f} ({lowest})"
            table.append([cell, f"{means.get('none', float('nan')):.1f}", text])
    return {"extra": {"Lowest accuracy": table}}
