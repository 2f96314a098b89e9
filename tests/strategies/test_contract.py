"""Properties of every algorithm in the registry, and of a third-party one.

An algorithm that is added to `ALGORITHMS` is tested here without any change; one that
needs an unusual task has a row in `algorithm_runs.UNUSUAL`.
"""

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from algorithm_runs import (
    ROUNDS,
    DisturbedGrid,
    KilledError,
    N,
    Outcome,
    assert_near,
    assert_same,
    run_tiny,
    settings_of,
    tiny_settings,
)
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    RecordDict,
)

from flwr_frl.clients.algorithms import client_setup
from flwr_frl.clients.client_app import make_app
from flwr_frl.clients.device.codec import unpack
from flwr_frl.clients.device.setup import build_client
from flwr_frl.clients.representation_transfer import FeatureTransferClient
from flwr_frl.common.errors import SettingsError
from flwr_frl.strategies.algorithms import ALGORITHMS, settings_owners
from flwr_frl.strategies.fedbuff import AsynchronousRounds
from flwr_frl.strategies.gossip.base import Gossip
from flwr_frl.strategies.srpfl import SRPFL
from flwr_frl.strategies.wrapping import Wrapping

GUEST = "guest.algorithm:Guest"


@pytest.fixture(scope="module", autouse=True)
def _guest() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "guest")
        yield


@pytest.fixture(scope="module", params=[*ALGORITHMS, GUEST])
def algorithm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def undisturbed(algorithm: str) -> Outcome:
    return run_tiny(algorithm)


@pytest.fixture
def in_rounds(algorithm: str) -> None:
    """Skip algorithms with overlapping versions, which `test_fedbuff.py` tests."""
    if issubclass(settings_owners(settings_of(algorithm))[0], AsynchronousRounds):
        pytest.skip("the clients of a version begin in different ones")


# Equal results


def test_killed_and_resumed_run_equals_an_undisturbed_one(
    algorithm: str, undisturbed: Outcome, tmp_path: Path
) -> None:
    # The files of a process that is killed in round 2: the clients have saved their
    # states of this round, the server has not. A second process resumes from them.
    left = tmp_path / "left"
    killed = partial(DisturbedGrid, killed_in=2, copy=left)
    with pytest.raises(KilledError):
        run_tiny(algorithm, tmp_path / "killed", killed)
    resumed = run_tiny(algorithm, left, resume=str(left))
    if algorithm != "fedasync":
        # The second version of FedAsync applies updates that began at the first.
        assert 1 not in resumed.grid.trained
    # The first row is from the killed process, the others are computed again.
    assert resumed.rows == undisturbed.rows
    assert_same(resumed, undisturbed)


def test_cohort_matches_clients_that_train_alone(
    algorithm: str, undisturbed: Outcome
) -> None:
    together = run_tiny(algorithm, cohort=str(N))
    assert together.grid.trained == undisturbed.grid.trained
    assert_near(together, undisturbed, 1e-4)


# Partial participation


@pytest.mark.usefixtures("in_rounds")
def test_clients_that_do_not_train_keep_their_state(undisturbed: Outcome) -> None:
    kept, rows = undisturbed.grid.kept, undisturbed.rows
    for now in range(1, ROUNDS + 1):
        asked = undisturbed.grid.trained.get(now, [])
        assert rows[now - 1]["clients"] == len(asked)
        for i in range(N):
            if i not in asked and now in kept:
                before, after = kept[now - 1][i], kept[now][i]
                assert before.keys() == after.keys()
                assert all((before[n] == after[n]).all() for n in before)


def test_personal_arrays_are_never_sent(algorithm: str, undisturbed: Outcome) -> None:
    settings = tiny_settings(algorithm)
    context = undisturbed.grid.contexts[1]
    client = build_client(context, client_setup(context, settings), ConfigRecord())
    personal = {*client._array_names(client.personal)} - {
        *client._array_names(client.sent)
    }
    for message, reply in undisturbed.grid.exchanged:
        for content in (message.content, reply.content):
            assert not personal & {*content.array_records.get("arrays", {})}


def test_the_deployed_model_is_the_same_every_time(
    algorithm: str, undisturbed: Outcome
) -> None:
    settings = tiny_settings(algorithm)
    messages = [message for message, _ in undisturbed.grid.exchanged]
    train = MessageType.TRAIN
    message = next(m for m in messages if m.metadata.message_type == train)
    node = undisturbed.grid.contexts[message.metadata.dst_node_id].node_config
    context = Context(0, 0, node, RecordDict(), {})
    reply = make_app(settings)(message, context)
    assert not reply.has_error()
    config = dict(message.content.config_records["config"])
    config["acknowledged-round"] = config["server-round"]
    client = build_client(context, client_setup(context, settings), config)
    if isinstance(client, FeatureTransferClient):
        pytest.skip("only its clients can combine what they receive")
    client._receive(unpack(message.content, client), config)
    first, second = (copy.deepcopy(client.deployed_model().state_dict()) for _ in "ab")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor)


def test_client_without_training_examples_is_tested_and_never_sampled(
    algorithm: str, undisturbed: Outcome
) -> None:
    if algorithm == GUEST:
        pytest.skip("needs a task with numbers as targets")
    dense = tiny_settings(algorithm)["task"] == "cohort_tasks:dense"
    task = f"cohort_tasks:untrained{'_dense' * dense}"
    result = run_tiny(algorithm, task=task, fraction_train=1.0)
    assert [row["rejected"] for row in result.rows] == [0] * ROUNDS
    # The mean is over the same clients as if all had training examples.
    assert result.rows[-1]["evaluated"] == undisturbed.rows[-1]["evaluated"]
    asked = {client for clients in result.grid.trained.values() for client in clients}
    # The nodes of a graph only mix their neighbours' models.
    gossips = issubclass(settings_owners(settings_of(algorithm))[0], Gossip)
    assert (2 in asked) == gossips


# Invalid replies and absent clients


def with_nan(reply: Message) -> None:
    """Replace the first array, or the training loss if there is none, by NaN."""
    for record in reply.content.array_records.values():
        for name, array in record.items():
            record[name] = Array(np.full_like(array.numpy(), np.nan, np.float32))
            return
    reply.content.metric_records["metrics"]["train-loss"] = float("nan")


def with_another_shape(reply: Message) -> None:
    """Double the first array, append a byte to a message, or add an unknown array."""
    for record in reply.content.array_records.values():
        for name, array in record.items():
            record[name] = Array(np.concatenate([np.atleast_1d(array.numpy())] * 2))
            return
    for record in reply.content.config_records.values():
        if "message" in record:
            record["message"] += b"\0"
            return
    arrays = ArrayRecord({"unknown": Array(np.zeros(3))})
    reply.content["arrays"] = arrays


@pytest.mark.usefixtures("in_rounds")
def test_invalid_reply_counts_as_no_training(
    algorithm: str, undisturbed: Outcome
) -> None:
    # Two clients of round 2 send invalid replies; in the other run, they never get the
    # messages. In round 3, another client (or the first) is offline.
    first, second, *others = undisturbed.grid.trained[2]
    invalid = {(first, 2): with_nan, (second, 2): with_another_shape}
    absent = [*others, first][0]
    result, expected = (
        run_tiny(
            algorithm, grid=partial(DisturbedGrid, changes=changes, away=[(absent, 3)])
        )
        for changes in (invalid, dict.fromkeys(invalid))
    )
    names = sorted(f"{client:06d}" for client in (first, second))
    assert sorted(result.rows[1]["rejected-clients"]) == names
    assert [row["rejected"] for row in result.rows] == [0, 2, 0]
    assert [row["rejected"] for row in expected.rows] == [0, 0, 0]
    assert absent not in result.grid.trained.get(3, [])
    clients = [
        [row["clients"] for row in outcome.rows] for outcome in (result, expected)
    ]
    assert clients[0] == clients[1]
    assert clients[0][-1] > 0
    assert_same(result, expected)
    assert all(np.isfinite(value).all() for value in result.arrays.values())


# Options


def test_srpfl_wraps_every_algorithm_that_samples(algorithm: str) -> None:
    kind = settings_owners(settings_of(algorithm))[0]
    more = {"srpfl_base": algorithm, "initial_nodes": 1, "fraction_train": 1.0}
    if issubclass(kind, Wrapping) or SRPFL.allowed_base(kind):
        with pytest.raises(SettingsError):
            run_tiny("srpfl", **more)
        return
    result = run_tiny("srpfl", **more)
    assert [row["clients"] for row in result.rows] == [1, 2, 4]
    assert [row["rejected"] for row in result.rows] == [0] * ROUNDS
