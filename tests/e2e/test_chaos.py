"""No head is lost when devices and the server are killed: 4 kills or ``--kills N``."""

import pytest
from chaos import Chaos, plan
from federation import Federation

# Two standard errors of the difference of two accuracies of 0.9 on 500 test images
NOISE = 0.04


@pytest.mark.e2e
def test_no_head_is_lost_when_devices_and_server_are_killed(
    five: Federation, pytestconfig: pytest.Config
) -> None:
    kills = int(pytestconfig.getoption("kills", 4))
    chaos = Chaos(five, kills)
    outcome = chaos.run()
    planned = [kill for wave in plan(kills, chaos.seed) for kill in wave]
    assert sorted((kill.who, kill.phase) for kill in outcome.kills) == sorted(planned)
    assert all(kill.recovery for kill in (*outcome.kills, outcome.server))
    assert [row["round"] for row in outcome.rounds] == list(
        range(1, chaos.num_rounds + 1)
    )
    assert outcome.losses == []
    assert outcome.states_checked > 0
    assert outcome.accuracy == pytest.approx(outcome.undisturbed, abs=NOISE)
