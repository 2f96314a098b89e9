"""Client-level differential privacy, compared with dp-accounting and closed forms."""

import json
import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from flwr.app import ConfigRecord
from function_clients import averaging, grid_of, replies_of, train_once
from scipy.stats import norm

from flwr_frl.common.errors import SettingsError
from flwr_frl.common.files import ACCOUNT_FILE
from flwr_frl.strategies import FLUTE, FedAvg, FLUTEStar
from flwr_frl.strategies.fedrep import FedRepLinear
from flwr_frl.strategies.server.privacy import ClientPrivacy, epsilon
from flwr_frl.strategies.server.replies import to_record

PRIVATE = {"server_dp_noise": 1.0, "server_dp_clip": 2.0, "server_dp_delta": 1e-5}


@pytest.mark.parametrize(
    ("noise", "count", "delta"), [(1.0, 1, 1e-5), (4.0, 300, 1e-3), (0.5, 7, 1e-6)]
)
def test_epsilon_matches_the_accountant_and_a_closed_form(noise, count, delta) -> None:
    accountant = RdpAccountant()
    accountant.compose(dp_event.GaussianDpEvent(noise), count)
    reported = epsilon(noise, count, delta)
    assert reported == accountant.get_epsilon(delta)
    # K Gaussian mechanisms equal one with noise z/√K, whose δ(ε) has a closed form
    # (Balle & Wang, ICML 2018, theorem 8). The reported ε is an upper bound, and less
    # than 18 % above the exact value.
    s = noise / math.sqrt(count)

    def exact(eps: float) -> float:
        there, back = 1 / (2 * s) - eps * s, -1 / (2 * s) - eps * s
        return norm.cdf(there) - math.exp(eps) * norm.cdf(back)

    assert exact(reported) <= delta < exact(0.85 * reported)


def private(noise: float, clip: float, rng=None) -> ClientPrivacy:
    privacy = ClientPrivacy(noise, clip, 1e-5)
    privacy.rng = rng or np.random.default_rng(0)
    return privacy


class Known:
    """A generator whose noise is always the same number of standard deviations."""

    def __init__(self, deviations: float) -> None:
        self.deviations = deviations

    def normal(self, mean, deviation, shape):
        return np.full(shape, mean + self.deviations * deviation)


def test_private_mean_matches_hand_computed_values() -> None:
    # The changes from (1, 1) are (3, 4), which is clipped from norm 5 to 2, and (0, 1),
    # which is not clipped. Three clients were asked.
    sent = {"w": np.ones(2, np.float32)}
    mean = private(0.5, 2.0, Known(1)).mean("abc", replies_of([4, 5], [1, 2]), sent)
    noise = 0.5 * 2
    expected = [1 + (1.2 + 0 + noise) / 3, 1 + (1.6 + 1 + noise) / 3]
    np.testing.assert_allclose(mean["w"], expected, rtol=1e-6)
    assert mean["w"].dtype == np.float32


def test_one_client_moves_the_mean_by_at_most_its_share() -> None:
    sent, usual = {"w": np.zeros(2)}, [[0.1, 0.0]] * 3

    def mean(*values) -> np.ndarray:
        return private(1.0, 2.0).mean("abcd", replies_of(*values), sent)["w"]

    without = mean(*usual)
    for value in ([1e30, -1e30], [3.0, 4.0], [0.0, 0.0]):
        assert np.linalg.norm(mean(*usual, value) - without) <= 2.0 / 4 * (1 + 1e-12)


@pytest.mark.parametrize("answered", [1, 4])
def test_noise_does_not_depend_on_the_number_of_replies(answered) -> None:
    sent = {"w": np.zeros(100_000), "v": np.zeros((1000, 100))}
    zero = [dict(sent)] * answered
    mean = private(1.5, 2.0).mean("abcd", zero, sent)
    for value in mean.values():
        # The standard deviation of 100,000 samples is accurate to about 0.2 %.
        assert np.std(value) == pytest.approx(1.5 * 2.0 / 4, rel=0.02)
    both = np.corrcoef(mean["w"], mean["v"].ravel())[0, 1]
    assert abs(both) < 0.02


def test_noise_is_not_determined_by_the_seed() -> None:
    first, second = (train_once(averaging(**PRIVATE), grid_of(3))[0] for _ in "ab")
    assert not np.array_equal(first["w"].numpy(), second["w"].numpy())


def test_strategy_makes_a_round_private() -> None:
    strategy = averaging(**PRIVATE)
    strategy._run.privacy.rng = Known(1)
    arrays, metrics = train_once(strategy, grid_of(3))
    # The clients change all 10 entries by 1, 2 and 3; all norms are clipped to 2.
    each = 2 / math.sqrt(10)
    np.testing.assert_allclose(arrays["b"].numpy(), [(3 * each + 2) / 3] * 4, rtol=1e-6)
    assert metrics["epsilon"] == epsilon(1.0, 1, 1e-5)
    assert metrics["delta"] == 1e-5
    assert strategy._run.privacy.asked == {"000000": 1, "000001": 1, "000002": 1}


def test_epsilon_is_that_of_the_client_asked_most_often() -> None:
    strategy = FedAvg(fraction_train=0.5, seed=3, **PRIVATE)
    grid, counts = grid_of(6), {}
    arrays = to_record({"w": np.zeros((2, 3), np.float32)})
    for server_round in range(1, 6):
        messages = strategy.configure_train(server_round, arrays, ConfigRecord(), grid)
        for message in messages:
            name = strategy._run.clients.name_of(message.metadata.dst_node_id)
            counts[name] = counts.get(name, 0) + 1
        replies = grid.send_and_receive(messages)
        arrays, metrics = strategy.aggregate_train(server_round, replies)
    assert strategy._run.privacy.asked == counts
    most = max(counts.values())
    assert 3 <= most <= 5
    assert metrics["epsilon"] == epsilon(1.0, most, 1e-5)


def test_mean_is_withheld_if_the_account_cannot_be_written(tmp_path, caplog) -> None:
    strategy = averaging(**PRIVATE)
    (tmp_path / "file").write_text("")
    strategy._run.privacy.directory = tmp_path / "file"
    arrays, metrics = train_once(strategy, grid_of(2))
    assert arrays is None
    assert "privacy.json not written, so the old arrays stay" in caplog.text
    assert metrics["epsilon"] == epsilon(1.0, 1, 1e-5)


def test_account_is_written_before_the_mean_is_computed(tmp_path) -> None:
    account = private(1.0, 2.0)
    account.keep_in(tmp_path)

    class Reply(dict):
        def items(self):
            written = json.loads((tmp_path / ACCOUNT_FILE).read_text())
            assert written["asked"] == {"a": 1, "b": 1}
            assert written["epsilon"] == epsilon(1.0, 1, 1e-5)
            return super().items()

    account.mean("ab", [Reply(w=np.zeros(2))], {"w": np.zeros(2)})
    assert (tmp_path / ACCOUNT_FILE).stat().st_mode & 0o777 == 0o600
    later = private(1.0, 2.0)
    later.keep_in(tmp_path)
    assert later.asked == {"a": 1, "b": 1}
    with pytest.raises(SettingsError, match=r"server-dp-noise is 2.0; expected 1.0"):
        private(2.0, 2.0).keep_in(tmp_path)


def test_means_before_the_account_has_a_folder_are_added_to_it(tmp_path) -> None:
    # An initial array is a mean; a killed run has left an account in the folder.
    killed, begun = private(1.0, 2.0), private(1.0, 2.0)
    killed.keep_in(tmp_path)
    killed.mean("ab", [{"w": np.zeros(2)}], {"w": np.zeros(2)})
    begun.mean("bc", [{"w": np.zeros(2)}], {"w": np.zeros(2)})
    begun.keep_in(tmp_path)
    counts = {"a": 1, "b": 2, "c": 1}
    assert begun.asked == counts
    assert json.loads((tmp_path / ACCOUNT_FILE).read_text())["asked"] == counts
    # The account of a resumed run is the one in the folder.
    resumed = private(1.0, 2.0)
    resumed.read(tmp_path)
    resumed.keep_in(tmp_path, resumed=True)
    assert resumed.asked == counts


def test_account_of_another_run_is_added_to_that_of_a_resumed_run(tmp_path) -> None:
    def release(account) -> None:
        account.mean("ab", [{"w": np.zeros(2)}], {"w": np.zeros(2)})

    first, killed = private(1.0, 2.0), private(1.0, 2.0)
    first.run_token, killed.run_token = "first", "killed"
    for account, releases in ((first, 2), (killed, 5)):
        account.keep_in(tmp_path / account.run_token)
        for _ in range(releases):
            release(account)
    # The first run continues in the folder of the killed one, twice.
    for expected in (8, 9):
        resumed = private(1.0, 2.0)
        resumed.run_token = "first"
        resumed.read(tmp_path / "first")
        resumed.keep_in(tmp_path / "killed", resumed=True)
        release(resumed)
        assert resumed.asked == {"a": expected, "b": expected}


def test_initial_mean_that_cannot_be_entered_ends_the_run(tmp_path) -> None:
    account = private(1.0, 2.0)
    account.mean("ab", [{"w": np.zeros(2)}], {"w": np.zeros(2)})
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"^privacy.json cannot be written to "):
        account.keep_in(tmp_path / "file")


@pytest.mark.parametrize("damage", ["", "[]", '{"noise": 1.0, "asked": [1]}'])
def test_damaged_account_fails_with_a_one_line_error(tmp_path, damage) -> None:
    (tmp_path / ACCOUNT_FILE).write_text(damage)
    with pytest.raises(SettingsError, match=r"^the account .* cannot be read: [^\n]*$"):
        private(1.0, 2.0).keep_in(tmp_path)


class Counting(FedAvg, uses_mean="only"):
    """A third-party strategy that declares support for client-level DP."""

    def aggregate(self, round):
        return dict(round.replies[0].arrays)


def test_algorithms_that_support_client_level_dp() -> None:
    kinds = FLUTE, FLUTEStar, Counting
    assert all(kind(**PRIVATE)._run.privacy for kind in kinds)
    for start in ("moments", "random", "gaussian"):
        assert FedRepLinear(**PRIVATE, initialization=start)._run.privacy
    assert not FedAvg()._run.privacy


def test_start_refuses_batch_norm_counters_with_noise() -> None:
    start = to_record({"w": np.zeros(2, np.float32), "seen": np.array(3)})
    with pytest.raises(SettingsError, match=r"^server-dp-noise is 1.0; .* 'seen'"):
        averaging(**PRIVATE).start(grid_of(2), start, num_rounds=1)
