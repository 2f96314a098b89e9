"""Checks of the names, properties, metrics and arrays that clients report."""

import json
import math

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from function_clients import (
    START,
    Client,
    averaging,
    changing,
    evaluate_once,
    grid_of,
    honest,
    train_once,
)
from malformed import with_one_bad
from participants import properties_of

from flwr_frl.common.text import one_line
from flwr_frl.results.results import strict_json
from flwr_frl.strategies import FedAvg, FedPer
from flwr_frl.strategies.flute import FLUTELinear
from flwr_frl.strategies.scaffold import SCAFFOLD
from flwr_frl.strategies.server.replies import (
    InvalidReplyError,
    check_name,
    check_values,
    error_reason,
    to_record,
)
from flwr_frl.strategies.server_app import class_counts


def test_one_line_escapes_and_shortens_text() -> None:
    assert one_line("a\n  b\tc") == "a b c"
    assert one_line("\x1b[31mred\x00\u202e") == r"\x1b[31mred\x00\u202e"
    assert one_line("x" * 1000) == "x" * 299 + "…"
    assert one_line("x" * 10**7, 5) == "xxxx…"
    assert one_line("Grüße 你好") == "Grüße 你好"
    # Python strings can hold lone surrogates, which cannot be encoded.
    assert one_line("\ud800").isprintable()


@pytest.mark.parametrize("name", ["", "x" * 101, "a\nb", "\x1b[2J", "\u202e", 7, b"x"])
def test_invalid_names_are_rejected(name: object) -> None:
    with pytest.raises(InvalidReplyError, match="name") as caught:
        check_name(name)
    assert "\n" not in str(caught.value)


BAD_PROPERTIES = {
    "examples as bytes": {"num-examples": b"5"},
    "examples as text": {"num-examples": "5"},
    "examples as a list": {"num-examples": [5]},
    "a truth": {"num-examples": True},
    "negative": {"num-examples": -1},
    "half": {"num-test-examples": 0.5},
    "nan": {"num-examples": math.nan},
    "more than there are": {"num-examples": 2**60},
    "structure as a number": {"structure": 5},
    "refusal as a list": {"refusal": ["no"]},
    "many": {f"p{i}": i for i in range(101)},
    "a long value": {"classes": "1" * 100_001},
    "a long list": {"classes": [1] * 12_501},
    "a long name": {"p" * 101: 1},
    "infinite": {"omega": math.inf},
}


@pytest.mark.parametrize("name", list(BAD_PROPERTIES))
def test_invalid_properties_are_rejected(name: str) -> None:
    with pytest.raises(InvalidReplyError):
        check_values({"client": "a", **BAD_PROPERTIES[name]})


def test_clients_with_invalid_properties_are_excluded(caplog) -> None:
    lies = {"num-examples": {1: b"5"}, "client": {2: "a\x1b[2J\nb"}}
    strategy, grid = FedAvg(), grid_of(4, properties_of(**lies))
    assert strategy._identify(grid) == [1, 4]
    assert strategy._identify(grid) == [1, 4]
    lines = [m for m in caplog.messages if "takes no part" in m]
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    "said",
    [
        {f"invented-{i}": 0.5 for i in range(5000)},
        {"loss": 1.7e308},
        {"loss": -1e39},
        {"loss": math.nan},
        {"accuracy": 1.5},
        {"accuracy-global": -0.1},
        {"num-examples": 1e300},
        {"a\nb": 1.0},
    ],
)
def test_invalid_metrics_are_rejected(said: dict) -> None:
    with pytest.raises(InvalidReplyError):
        check_values(said)

    # In an evaluation such a reply is left out, and counted as rejected.
    def change(content: RecordDict, i: int) -> None:
        if i == 1:
            content.metric_records["metrics"].update(said)

    grid = grid_of(4, changing(MessageType.EVALUATE, change))
    metrics = evaluate_once(FedAvg(), grid)
    assert metrics["evaluated"] == 3
    assert metrics["evaluation-rejected"] == 1
    # Mean of the accuracies 0, 0.2 and 0.3
    assert metrics["accuracy"] == pytest.approx(0.5 / 3)
    assert len(metrics) < 10


def test_strict_json_writes_non_finite_numbers_as_null() -> None:
    text = strict_json({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


# Overflow


def doubles(value: float, is_change: bool = False) -> Client:
    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == MessageType.TRAIN:
            sent = message.content.array_records["arrays"]
            arrays = {n: np.full(a.shape, value, a.dtype) for n, a in sent.items()}
            reply.content["arrays"] = to_record(arrays)
            reply.content["metrics"]["is-change"] = int(is_change)
        return reply

    return client


def test_float64_values_beyond_float32_are_rejected() -> None:
    start = {"w": np.zeros(3)}
    strategy = averaging()
    grid = grid_of(3, with_one_bad(doubles(1e308)))
    arrays, metrics = train_once(strategy, grid, start)
    # Clients 0 and 2 add 1 and 3.
    assert arrays["w"].numpy().tolist() == [2.0] * 3
    assert metrics["rejected"] == 1


def test_aggregate_that_is_not_finite_is_discarded(caplog) -> None:
    class Exploding(FedAvg):
        def aggregate(self, round):
            large = {n: a * np.float32(1e38) for n, a in START.items()}
            return large | {"w": np.full((2, 3), np.inf, np.float32)}

    strategy = Exploding(fraction_train=1.0)
    arrays, _ = train_once(strategy, grid_of(3))
    assert arrays is None
    assert strategy._run.clients.acknowledged == {}
    assert "not finite; the old arrays stay" in caplog.text


def test_personal_arrays_of_a_round_without_aggregate_are_not_stored() -> None:
    overflowing = {"server_optimizer": "momentum", "server_optimizer_rate": 1e300}
    for settings, stored in (({}, 3), (overflowing, 0)):
        strategy = FedPer(personal=("w",), fraction_train=1.0, **settings)
        arrays, _ = train_once(strategy, grid_of(3))
        assert (arrays is None) == (stored == 0)
        assert len(strategy.state.get("personal", {})) == stored


def test_flute_linear_and_scaffold_keep_their_state_on_overflow() -> None:
    linear = FLUTELinear(dimension=3, rank=2, learning_rate=1e38, fraction_train=1.0)

    def change(content: RecordDict, i: int) -> None:
        arrays = {
            "gradient.representation.weight": np.full((2, 3), 1e38, "f4"),
            "gradient.head.weight": np.full((1, 2), 1e38),
        }
        content["arrays"] = to_record(arrays)
        content["metrics"]["is-change"] = 1

    client = changing(MessageType.TRAIN, change)
    start = {"representation.weight": np.ones((2, 3), "f4")}
    arrays, metrics = train_once(linear, grid_of(2, client), start)
    assert metrics["rejected"] == 0
    assert arrays is None
    assert linear.heads == {}

    scaffold = SCAFFOLD(global_learning_rate=1e10, fraction_train=1.0)
    start = {"w": np.zeros(2, "f4"), "control.w": np.zeros(2, "f4")}
    messages = scaffold.configure_train(1, to_record(start), ConfigRecord(), grid_of(2))
    assert len(list(messages)) == 2
    arrays, metrics = train_once(scaffold, grid_of(2, doubles(3e38, True)), start)
    assert metrics["rejected"] == 0
    assert arrays is None
    assert "total" not in scaffold.state


def test_class_counts_are_returned_by_class():
    properties = {"held-classes": ["a", "b"], "class-counts": [3, 0]}
    assert class_counts(properties) == {"a": 3, "b": 0}
    assert class_counts({}) == {}


def test_the_reason_of_a_traceback_is_its_exception():
    lines = [
        "<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'ray::Actor.run()",
        '  File "app.py", line 3, in train',
        "    model.load_state_dict(state)",
        "mine.Diverged: at step 3",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        '  File "client_app.py", line 9, in run',
        "    ^^^^^^^^^^",
        "flwr.client.client_app.ClientAppException: ",
        "Exception Diverged occurred. Message: at step 3",
    ]

    def reason_of(text):
        error = Error(code=0, reason=text)
        sent = Message(RecordDict(), 1, MessageType.TRAIN)
        return error_reason(Message(error, reply_to=sent))

    assert reason_of("\n".join(lines)) == lines[-2] + lines[-1]
    assert reason_of("no memory") == "no memory"
