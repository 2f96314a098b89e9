"""SRPFL by real arrival order: one SuperLink, six SuperNodes, two slow, one killed."""

import sqlite3
import threading
from pathlib import Path

import pytest
from federation import Federation, read_lines, wait_until

APP = Path(__file__).parent / "arrivals_app"
# Seconds; 20 and not 10, so that a busy machine does not decide who is slow.
DELAYS = {"a": 0, "b": 0, "c": 0, "slow-1": 20, "slow-2": 20, "victim": 3}


@pytest.mark.e2e
def test_rounds_close_with_the_first_replies(
    federation: Federation, tmp_path: Path
) -> None:
    database = tmp_path / "superlink.db"
    federation.start_superlink("--database", str(database))
    for name, delay in DELAYS.items():
        federation.start_supernode(name, f'client-name="{name}" delay={delay}')
    output: list[str] = []
    run = threading.Thread(
        target=lambda: output.append(federation.run(APP, f'log="{tmp_path}"', 400))
    )
    run.start()

    # Round 3 is the first that waits for four, so the victim is in the middle of it.
    def victim_trains_in_round_3() -> bool:
        begun = read_lines(tmp_path / "victim-begins.jsonl")
        return any(line["round"] >= 3 for line in begun)

    wait_until(victim_trains_in_round_3, 200, "the victim's third round")
    federation.kill("victim")
    run.join()

    rounds = read_lines(tmp_path / "server.jsonl")
    assert [line["round"] for line in rounds] == [1, 2, 3, 4, 5, 6, 7], output
    # A reply of an earlier round in a mean would make it smaller.
    for line in rounds:
        assert line["value"] == [line["round"]] * 3
    # n = 2, 2, 4, 4, then all that are there.
    assert [line["clients"] for line in rounds[:2]] == [2, 2]
    # The first round closed while both slow clients were still at it.
    for name in ("slow-1", "slow-2"):
        ended = read_lines(tmp_path / f"{name}-ends.jsonl")
        assert rounds[0]["closed"] < ended[0]["time"], f"waited for {name}"
    # In the last round everyone is waited for: all but the victim.
    assert rounds[-1]["clients"] == len(DELAYS) - 1
    # They are busy in the first evaluation and tested in the last one.
    assert not {"slow-1", "slow-2"} & set(rounds[0]["evaluated"])
    assert {"slow-1", "slow-2"} <= set(rounds[-1]["evaluated"])
    # What came late was pulled and dropped: no node is asked while it owes a reply.
    assert rounds[-1]["dropped"] > 0
    for name in DELAYS:
        begun = read_lines(tmp_path / f"{name}-begins.jsonl")
        ended = read_lines(tmp_path / f"{name}-ends.jsonl")
        for earlier, later in zip(ended, begun[1:], strict=False):
            assert later["sent"] >= earlier["time"], f"{name} had two messages"
    assert read_lines(tmp_path / "end.jsonl") == [{"left": 0}]
    assert left_over(database) == 0


def left_over(database: Path) -> int:
    """Return how many replies lie in the SuperLink's database."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        tables = [
            name
            for (name,) in connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table'"
            )
        ]
        assert "message_res" in tables, tables
        (count,) = connection.execute("SELECT COUNT(*) FROM message_res").fetchone()
    return int(count)
