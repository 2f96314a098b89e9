"""FedBuff over real SuperNodes: nobody waits for a client that is ten times slower."""

from pathlib import Path

import pytest
from federation import Federation, read_lines

APP = Path(__file__).parent / "asynchronous_app"
# Seconds in addition to the start of the ClientApp.
DELAYS = {"a": 0, "b": 0, "slow": 40}


@pytest.mark.e2e
def test_versions_are_made_while_a_slow_client_trains(
    federation: Federation, tmp_path: Path
) -> None:
    federation.start_superlink()
    for name, delay in DELAYS.items():
        federation.start_supernode(name, f'client-name="{name}" delay={delay}')
    output = federation.run(APP, f'log="{tmp_path}"', 400)
    lines = read_lines(tmp_path / "server.jsonl")
    rounds = [line for line in lines if line["kind"] == "round"]
    versions = [line for line in lines if line["kind"] == "version"]
    assert (len(rounds), len(versions)) == (2, 8), output
    # Every change is +1, divided by 1 + τ.
    x = 0.0
    for line in versions:
        x += 1 / (1 + line["staleness-max"])
        assert line["x"] == pytest.approx([x] * 2, rel=1e-6)
        assert line["clients"] == 1
    per_round = rounds[-1]["seconds"] / len(rounds)
    assert per_round > DELAYS["slow"]
    assert versions[-1]["updates"].get("slow", 0) <= 2
    fast = [line for line in versions if line["seconds"] < DELAYS["slow"]]
    assert len(fast) >= 3
    per_version = versions[-1]["seconds"] / len(versions)
    print(f"{60 / per_round:.1f} rounds and {60 / per_version:.1f} versions a minute")
