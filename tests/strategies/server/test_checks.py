"""Checks of the names, properties, metrics and arrays that clients report."""

import json
import math

import numpy as np
import pytest
from flwr.app import (
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    RecordDict,
)
from function_clients import (
    START,
    Client,
    averaging,
    evaluate_once,
    grid_of,
    honest,
    partition_of,
    train_once,
)
from malformed import with_metrics, with_one_bad

from flwr_frl.common.settings import SettingsError, TrainingDivergedError
from flwr_frl.common.text import one_line
from flwr_frl.results.results import strict_json
from flwr_frl.strategies import FLUTE, FedAvg
from flwr_frl.strategies.flute import FLUTELinear
from flwr_frl.strategies.scaffold import SCAFFOLD
from flwr_frl.strategies.server.checks import (
    InvalidReplyError,
    check_name,
    check_properties,
    check_values,
    class_counts,
    distinct_labels,
    error_reason,
)
from flwr_frl.strategies.server.replies import to_record


def test_one_line_escapes_and_shortens_text() -> None:
    assert one_line("a\n  b\tc") == "a b c"
    assert one_line("\x1b[31mred\x00\u202e") == r"\x1b[31mred\x00\u202e"
    assert one_line("x" * 1000) == "x" * 299 + "…"
    assert one_line("x" * 10**7, 5) == "xxxx…"
    assert one_line("Grüße 你好") == "Grüße 你好"
    # Python strings can hold lone surrogates, which cannot be encoded.
    assert one_line("\ud800").isprintable()


@pytest.mark.parametrize("name", ["pi-3", "x" * 100, "küche", "../../etc", "a b"])
def test_valid_names_are_accepted(name: str) -> None:
    assert check_name(name) == name


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
        check_properties({"client": "a", **BAD_PROPERTIES[name]})


def test_clients_with_invalid_properties_are_excluded(caplog) -> None:
    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == MessageType.QUERY:
            record = reply.content.config_records["properties"]
            lies = [{}, {"num-examples": b"5"}, {"client": "a\x1b[2J\nb"}, {}]
            record.update(lies[partition_of(context)])
        return reply

    strategy, grid = FedAvg(), grid_of(4, client)
    assert strategy.identify(grid) == [1, 4]
    assert strategy.identify(grid) == [1, 4]
    lines = [m for m in caplog.messages if "takes no part" in m]
    assert lines == [
        "client 2 takes no part: it num-examples is b'5'",
        "client 3 takes no part: it has a name that cannot be printed: 'a\\x1b[2J\\nb'",
    ]


def test_custom_metrics_may_begin_with_accuracy() -> None:
    metrics = {"accuracy": 1.0, "accuracy_percent": 93.2, "accuracy-gap": -0.1}
    assert check_values(metrics) == metrics


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

    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        evaluates = message.metadata.message_type == MessageType.EVALUATE
        if evaluates and partition_of(context) == 1:
            for name, value in said.items():
                reply.content.metric_records["metrics"][name] = value
        return reply

    metrics = evaluate_once(FedAvg(), grid_of(4, client))
    assert metrics["evaluated"] == 3
    assert metrics["evaluation-rejected"] == 1
    # Mean of the accuracies 0, 0.2 and 0.3
    assert metrics["accuracy"] == pytest.approx(0.5 / 3)
    assert len(metrics) < 10


def test_impossible_number_of_examples_is_rejected() -> None:
    bad = with_metrics(num_examples=1e300, train_loss=1.0)
    strategy = averaging(weighting="examples")
    arrays, metrics = train_once(strategy, grid_of(4, with_one_bad(bad)))
    # Weighted by 1, 3 and 4 examples: (1 + 9 + 16) / 8
    assert arrays["b"].numpy().tolist() == [26 / 8] * 4
    assert metrics["rejected"] == 1


def test_client_error_is_logged_as_one_short_line(caplog) -> None:
    def crash(message: Message, context: Context) -> Message:
        raise RuntimeError("\x1b[2J\n" + "x" * 10_000)

    caplog.set_level("INFO", logger="flwr")
    strategy = averaging()
    train_once(strategy, grid_of(3, with_one_bad(crash)))
    ((_, why),) = strategy.round.rejections
    assert why.startswith(r"is an error: RuntimeError: \x1b[2J xxx")
    assert len(why) == 300
    # The in-process grid also logs the client's traceback; no reply contains that.
    lines = [m for m in caplog.messages if "a client failed" not in m]
    assert all(m.isprintable() and len(m) < 400 for m in lines)


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [
        (RuntimeError("a defect"), True),
        (SettingsError("momentum is 2; expected in [0, 1)"), False),
        (TrainingDivergedError("the loss is nan after epoch 1"), False),
    ],
)
def test_only_unexpected_client_errors_are_logged_with_a_traceback(
    error: Exception, has_traceback: bool, caplog
) -> None:
    def fail(message: Message, context: Context) -> Message:
        raise error

    train_once(averaging(), grid_of(3, with_one_bad(fail)))
    assert any(str(error) in line for line in caplog.messages)
    assert any("Traceback" in line for line in caplog.messages) is has_traceback


def test_strict_json_writes_non_finite_numbers_as_null() -> None:
    text = strict_json({"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(text, parse_constant=refuse) == {
        "a": None,
        "b": [None, 1.5],
        "c": {"d": None},
    }


# Overflow


def doubles(value: float) -> Client:
    def client(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == MessageType.TRAIN:
            sent = message.content.array_records["arrays"]
            arrays = {n: np.full(a.shape, value, a.dtype) for n, a in sent.items()}
            reply.content["arrays"] = to_record(arrays)
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
    assert strategy.ledger.acknowledged == {}
    assert "round 1 is not finite; the old arrays stay" in caplog.text


def test_aggregate_that_returns_none_is_logged(caplog) -> None:
    class Forgetful(FedAvg):
        def aggregate(self, round):
            pass

    arrays, _ = train_once(Forgetful(fraction_train=1.0), grid_of(3))
    assert arrays is None
    line = "round 1: Forgetful.aggregate returned None for 3 valid replies; the old "
    line += "arrays stay"
    assert line in caplog.messages


def test_flute_keeps_a_head_if_its_step_is_not_finite(caplog) -> None:
    strategy = FLUTE()
    strategy.heads["a"] = {"head.weight": np.ones((2, 2), np.float32)}
    good = {"head.weight": np.full((2, 2), 3, np.float32)}
    bad = {"head.weight": np.full((2, 2), np.nan, np.float32)}
    strategy.save_heads(["a", "b"], [bad, good])
    assert strategy.heads["a"]["head.weight"].tolist() == [[1, 1], [1, 1]]
    assert strategy.heads["b"] is good
    assert "the step on client a's head is not finite" in caplog.text


def test_flute_linear_and_scaffold_keep_their_state_on_overflow() -> None:
    linear = FLUTELinear(dimension=3, rank=2, learning_rate=1e38, fraction_train=1.0)

    def client(message: Message, context: Context) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return honest(message, context)
        reply = honest(message, context)
        names = {"representation.weight": (2, 3), "head.weight": (1, 2)}
        arrays = {f"gradient.{n}": np.full(s, 1e38) for n, s in names.items()}
        reply.content["arrays"] = to_record(arrays)
        return reply

    arrays, _ = train_once(
        linear, grid_of(2, client), {"representation.weight": np.ones((2, 3))}
    )
    assert arrays is None
    assert linear.heads == {}

    scaffold = SCAFFOLD(global_learning_rate=1e10, fraction_train=1.0)
    start = {"w": np.zeros(2), "control.w": np.zeros(2)}
    messages = scaffold.configure_train(1, to_record(start), ConfigRecord(), grid_of(2))
    assert len(list(messages)) == 2
    arrays, _ = train_once(scaffold, grid_of(2, doubles(3e38)), start)
    assert arrays is None
    assert scaffold.state["total"] == 0.0


def test_class_counts_are_returned_by_class():
    properties = {"held-classes": ["a", "b"], "class-counts": [3, 0]}
    assert class_counts(properties) == {"a": 3, "b": 0}
    assert class_counts({}) == {}


@pytest.mark.parametrize(
    ("names", "counts"),
    [(["a"], 5), ("a", [5]), ([b"a"], [5]), ([1], [5]), (["a"], [0.5]), (["a"], [-1])],
)
def test_invalid_class_counts_are_ignored(names, counts):
    assert class_counts({"held-classes": names, "class-counts": counts}) == {}


def test_class_names_of_white_space_are_kept_apart():
    properties = {"held-classes": ["\n", " ", "größe"], "class-counts": [3, 2, 1]}
    assert class_counts(properties) == {"\\n": 3, " ": 2, "größe": 1}


def test_labels_are_distinct_from_each_other_and_from_names():
    # Folders may be named like clients, but clients of other numbers.
    swapped = {"000000": "000001", "000001": "000002", "000002": "000003"}
    assert distinct_labels(swapped) == swapped
    # The last client has no label, so that no other may have its name; the client
    # before then has its own name, and so on.
    assert distinct_labels({**swapped, "000003": ""}) == {}
    assert distinct_labels({"a": "x", "b": "x", "c": "c", "d": ""}) == {
        "a": "x",
        "c": "c",
    }


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
