"""Rounds by real arrival order with four SuperNodes, one slow and one killed."""

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from federation import Federation, read_lines, wait_until

APP = Path(__file__).parent / "arrivals_app"
NAMES = ("a", "b", "slow", "victim")
# The same values as in the app
MISSED, ROUNDS, VERSIONS = 3, 6, 10


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    federation = Federation(tmp_path_factory.mktemp("arrivals"))
    try:
        federation.start_superlink("--database", str(database_of(federation)))
        for name in NAMES:
            federation.start_supernode(name, f'client-name="{name}"')
        yield federation
    finally:
        federation.close()


def database_of(federation: Federation) -> Path:
    return federation.home / "superlink.db"


@pytest.mark.e2e
def test_fedbuff_creates_versions_while_a_slow_client_trains(
    four: Federation, tmp_path: Path
) -> None:
    log = four.run(APP, f'log="{tmp_path}" asynchronous=true', 600)
    versions = read_lines(tmp_path / "server.jsonl")
    assert len(versions) == VERSIONS, log
    # Every update is 1, divided by 1 + τ.
    x = 0.0
    for line in versions:
        x += 1 / (1 + line["staleness-max"])
        assert line["x"] == pytest.approx([x] * 3, rel=1e-6)
        assert line["clients"] == 1
    # Versions do not wait for the slow client, and its update is used when it arrives.
    assert not any("slow" in line["updates"] for line in versions[:MISSED])
    late = next(line for line in versions if line["updates"].get("slow"))
    assert late["staleness-max"] >= MISSED
    # The last version waits for clients that are still training.
    assert versions[-1]["evaluated"] == len(NAMES)


@pytest.mark.e2e
def test_rounds_close_with_the_first_replies(four: Federation, tmp_path: Path) -> None:
    output: list[str] = []
    config = f'log="{tmp_path}" kill=true'
    run = threading.Thread(target=lambda: output.append(four.run(APP, config, 600)))
    run.start()

    def victim_is_held() -> bool:
        begun = read_lines(tmp_path / "victim-begins.jsonl")
        return any(line["round"] >= MISSED for line in begun)

    wait_until(victim_is_held, 300, "the victim's third round")
    four.kill("victim")
    run.join()

    rounds = read_lines(tmp_path / "server.jsonl")
    assert [line["round"] for line in rounds] == list(range(1, ROUNDS + 1)), output
    # On a busy machine, the victim may be the only client without work.
    answered = [line for line in rounds if line["clients"]]
    assert len(answered) >= ROUNDS - 1
    # A reply of an earlier round would lower the mean.
    for line in answered:
        assert line["value"] == [line["round"]] * 3
    # n = 1 in the first two rounds
    assert [line["clients"] for line in rounds[:2]] == [1, 1]
    # The first rounds closed while the slow client still handled its first message.
    slow = read_lines(tmp_path / "slow-ends.jsonl")
    assert slow[0]["round"] == 1
    assert rounds[MISSED - 1]["closed"] < slow[0]["time"]
    # The last round waits for all clients except the victim.
    assert rounds[-1]["clients"] == len(NAMES) - 1
    # The slow client is busy in the first evaluation and tested in the last one.
    assert "slow" not in rounds[0]["evaluated"]
    assert "slow" in rounds[-1]["evaluated"]
    # No node gets a message before it has replied.
    for name in NAMES:
        begun = read_lines(tmp_path / f"{name}-begins.jsonl")
        ended = read_lines(tmp_path / f"{name}-ends.jsonl")
        for earlier, later in zip(ended, begun[1:], strict=False):
            assert later["sent"] >= earlier["time"], f"{name} had two messages"
    # Only the victim may still owe a reply, until the SuperLink notices its death.
    [end] = read_lines(tmp_path / "end.jsonl")
    assert set(end["owed"]) <= {"victim"}
    assert left_over(database_of(four)) == 0


def left_over(database: Path) -> int:
    """Return the number of replies that are left in the SuperLink's database."""
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
