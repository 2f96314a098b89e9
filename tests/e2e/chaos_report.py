"""Report of a chaos run as Markdown, JSON and a figure."""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from chaos import CLIENTS, PHASES, RESTART, ROUND_TIMEOUT, Chaos, Kill, Outcome
from federation import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from common import markdown, provenance

COLOURS = dict(zip(PHASES, ("C0", "C1", "C2", "C3"), strict=True))
SAID = {
    "training": "in training",
    "saving": "while saving, before the rename",
    "saved": "while saving, before the reply",
    "between rounds": "between rounds",
}


def write_report(folder: Path, chaos: Chaos, outcome: Outcome, noise: float) -> None:
    """Write ``chaos.md``, ``chaos.json`` and ``chaos.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    about = provenance()
    about["command"] = (
        f"python -m pytest tests/e2e/test_chaos.py -m e2e --kills {chaos.kills} "
        "--chaos-report benchmarks/results"
    )
    text = (
        "# Devices and a SuperLink that are killed\n\n"
        f"`{about['command']}` at commit {about['commit']}; {about['machine']}, "
        f"Python {about['python']}, torch {about['torch']}\n\n"
        + body(chaos, outcome, noise)
    )
    (folder / "chaos.md").write_text(text, encoding="utf-8")
    data = {
        "about": about,
        "kills": [as_json(kill) for kill in outcome.kills],
        "server": as_json(outcome.server),
        "closed": {n: round(t, 1) for n, t in outcome.closed.items()},
        "clients": [row["clients"] for row in outcome.rounds],
        "states-checked": outcome.states_checked,
        "losses": outcome.losses,
        "accuracy": outcome.accuracy,
        "undisturbed": outcome.undisturbed,
    }
    (folder / "chaos.json").write_text(
        json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8"
    )
    draw(folder / "chaos.png", outcome)


def as_json(kill: Kill) -> dict[str, object]:
    recovery = None if kill.recovery is None else round(kill.recovery, 1)
    return {**vars(kill), "time": round(kill.time, 1), "recovery": recovery}


def body(chaos: Chaos, outcome: Outcome, noise: float) -> str:
    groups = {SAID[p]: [k for k in outcome.kills if k.phase == p] for p in PHASES}
    groups["all"] = outcome.kills
    rows = []
    for name, kills in groups.items():
        times = [kill.recovery for kill in kills if kill.recovery is not None]
        spread = [f"{f(times):.0f}" for f in (np.min, np.median, np.max) if times]
        rows.append((name, len(kills), len(kills) - len(times), *spread))
    victims = Counter(kill.who for kill in outcome.kills)
    shares = ", ".join(f"{victims[client]}" for client in CLIENTS)
    trained = sum(int(str(row["clients"])) for row in outcome.rounds)
    return (
        f"One SuperLink with TLS and {len(CLIENTS)} SuperNodes with keys, each with "
        f"its own images and state directory. FedRep, {chaos.num_rounds} rounds, "
        f"checkpoint-every 1, round-timeout {ROUND_TIMEOUT:.0f} s. A SuperNode and "
        f"its ClientApp were killed with `kill -9` {len(outcome.kills)} times "
        f"({shares} per device, in waves of up to {len(CLIENTS) - 1}). The SuperLink "
        "and its ServerApp were killed once, in the middle of a round, and `flwr "
        'run` was repeated with `resume="…"`. A killed device is restarted after '
        f"{RESTART:.0f} s, and retries until it is accepted.\n\nThe table has "
        "recovery times: seconds from the kill to the end of the first round in "
        "which a reply of the device counted again. The device's key is refused "
        "until the SuperLink has missed the heartbeats of the old session, which "
        "takes 30 to 60 s. Then the current round must end, which may take "
        "round-timeout, and so must the next one, in which the device takes part. "
        f"Rounds in which no device was missing took {quiet(outcome):.0f} s "
        "(median).\n\n"
        + markdown(
            ("killed", "kills", "not recovered", "shortest", "median", "longest"), rows
        )
        + f"\nThe SuperLink was killed in round {outcome.server.server_round + 1}. "
        f"The resumed run completed this round after {outcome.server.recovery:.0f} "
        f"s.\n\nHeads lost: {len(outcome.losses)}. {outcome.states_checked} states "
        "were checked: each head with which a device continued, and the file in its "
        "state directory at the end. They must be bit-identical to the head that the "
        f"device saved in its last acknowledged round.\n\nAll {len(outcome.rounds)} "
        f"rounds are in `metrics.jsonl`; {trained} of "
        f"{len(CLIENTS) * chaos.num_rounds} replies counted. The final accuracy is "
        f"{100 * outcome.accuracy:.1f} %, and {100 * outcome.undisturbed:.1f} % "
        f"without kills. Two standard errors of the difference are {100 * noise:.0f} "
        "points, on 500 test images. The classes are permuted differently on every "
        "device, so the head of another device would nearly always be wrong.\n\n"
        "![kills and recoveries](chaos.png)\n"
    )


def quiet(outcome: Outcome) -> float:
    """Return the median duration of rounds in which no device was missing."""
    closed = outcome.closed
    resumed = outcome.server.server_round + 1
    lengths = [
        closed[n] - closed[n - 1]
        for n, row in enumerate(outcome.rounds, start=1)
        if row["clients"] == len(CLIENTS) and n != resumed and n - 1 in closed
    ]
    return float(np.median(lengths))


def draw(path: Path, outcome: Outcome) -> None:
    # Imported here, as it is slow to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    places = {name: i for i, name in enumerate(["SuperLink", *reversed(CLIENTS)])}
    for kill in (*outcome.kills, outcome.server):
        place = places[kill.who]
        colour = COLOURS.get(kill.phase, "black")
        axes.barh(place, kill.recovery or 0, 0.5, kill.time, color=colour, alpha=0.3)
        axes.plot(kill.time, place, "x", color=colour)
    for phase, colour in COLOURS.items():
        axes.plot([], [], "x", color=colour, label=SAID[phase])
    for server_round, time in outcome.closed.items():
        axes.axvline(time, color="grey", lw=0.5, zorder=0)
        if server_round % 2 == 1:
            axes.text(
                time, 1.01, server_round, transform=axes.get_xaxis_transform(),
                ha="center", va="bottom", fontsize=7, color="grey",
            )  # fmt: skip
    names = [n if n == "SuperLink" else f"device {int(n)}" for n in places]
    axes.set_yticks(list(places.values()), names)
    axes.set_xlabel("seconds; grey: ends of rounds")
    figure.legend(loc="outside lower center", ncols=len(COLOURS), frameon=False)
    figure.savefig(path, dpi=150)
