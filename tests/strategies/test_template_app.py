"""An app of Flower's PyTorch template with two changed lines in server_app.py."""

import logging
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from client_messages import values_of
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.errors import SettingsError
from flwr_frl.strategies import FedAvg, FedRep, FFALoRA
from flwr_frl.strategies.grids.inbox import Inbox
from flwr_frl.strategies.grids.simulation import InlineGrid

APP = Path(__file__).parents[1] / "e2e" / "template_app"
CONFIG = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"][
    "config"
]
IMPORT = "from flwr.serverapp.strategy import FedAvg"
STRATEGY = "FedAvg(fraction_evaluate=fraction_evaluate)"
OURS = "from flwr_frl.strategies import {}"
N = 4
GUIDE = (Path(__file__).parents[2] / "docs" / "flower-app.md").read_text()
SENTENCE = GUIDE.split("with an unchanged ClientApp: ")[1].split("SRPFL")[0]
# Strategies that work with any ClientApp, as the guide lists them.
LISTED = re.findall(r"`(\w+)`", SENTENCE)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(APP)
    yield
    for name in [name for name in sys.modules if name.startswith("templateapp")]:
        del sys.modules[name]


class ConnectedGrid(InlineGrid):
    """Treated as a network, like Flower's grids."""

    in_process = False


def client_app() -> ClientApp:
    app: ClientApp = import_module("templateapp.client_app").app
    return app


def run(imported: str, strategy: str, app: ClientApp | None = None) -> Result:
    """Run the app with another import and another strategy in its ServerApp."""
    source = (APP / "templateapp" / "server_app.py").read_text()
    assert source.count(IMPORT) == source.count(STRATEGY) == 1
    source = source.replace(IMPORT, imported).replace(STRATEGY, strategy)
    server_app = ModuleType("changed")
    exec(source, vars(server_app))
    grid = ConnectedGrid(app or client_app(), N, CONFIG)
    context = Context(1, 0, {}, RecordDict(), CONFIG)
    result: Result = server_app.main(grid, context)
    return result


def weights(result: Result) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in result.arrays.items()}


@pytest.mark.parametrize(
    "arguments", ['weighting="examples"', 'weighting="examples", min_evaluate_nodes=2']
)
def test_fedavg_equals_that_of_flower(arguments: str) -> None:
    ours = run(
        OURS.format("FedAvg"),
        f"FedAvg(fraction_train=1.0, fraction_evaluate=fraction_evaluate, {arguments})",
    )
    theirs = run(IMPORT, STRATEGY)
    for name, array in weights(theirs).items():
        np.testing.assert_allclose(weights(ours)[name], array, rtol=1e-5, atol=1e-6)
    for server_round in range(CONFIG["num-server-rounds"] + 1):
        mine = ours.evaluate_metrics_serverapp[server_round]
        assert (
            mine["accuracy"]
            == theirs.evaluate_metrics_serverapp[server_round]["accuracy"]
        )
    # All clients have 40 test examples.
    last = CONFIG["num-server-rounds"]
    mine = ours.evaluate_metrics_clientapp[last]
    for name, value in theirs.evaluate_metrics_clientapp[last].items():
        assert mine[name] == pytest.approx(value, rel=1e-5)
    assert ours.evaluate_metrics_serverapp[last]["accuracy"] > 0.6


@pytest.mark.parametrize(
    ("imported", "strategy"),
    [
        (
            "SRPFL, FedAvg",
            "SRPFL(FedAvg(fraction_train=1.0, fraction_evaluate=fraction_evaluate))",
        ),
        (
            "SRPFL, FedRep",
            "SRPFL(FedRep(fraction_train=1.0, fraction_evaluate=fraction_evaluate))",
        ),
        (
            "FedBuff, FedAvg",
            "FedBuff(FedAvg(fraction_evaluate=fraction_evaluate), concurrency=4, "
            "buffer_size=2)",
        ),
    ],
)
def test_unchanged_client_app_trains(imported: str, strategy: str) -> None:
    result = run(OURS.format(imported), strategy)
    rounds = CONFIG["num-server-rounds"]
    for server_round in range(1, rounds + 1):
        assert result.train_metrics_clientapp[server_round]["rejected"] == 0
        # FedBuff does not test clients that are still training.
        least = 2 if "FedBuff" in imported else N
        assert (
            N >= result.evaluate_metrics_clientapp[server_round]["evaluated"] >= least
        )
    losses = [result.evaluate_metrics_serverapp[r]["loss"] for r in (0, rounds)]
    assert losses[1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", LISTED)
def test_listed_strategies_average_complete_models_like_fedavg(name: str) -> None:
    arguments = "fraction_train=1.0, fraction_evaluate=fraction_evaluate"
    ours = run(OURS.format(name), f"{name}({arguments})")
    theirs = run(OURS.format("FedAvg"), f"FedAvg({arguments})")
    for array, expected in zip(
        weights(ours).values(), weights(theirs).values(), strict=True
    ):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)
    assert ours.train_metrics_clientapp[1]["rejected"] == 0


@pytest.mark.parametrize("name", ["FedProto", "FedDBE", "FedPAC"])
def test_missing_additional_arrays_are_an_error(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        run(OURS.format(name), f"{name}()")
    assert caught.value.code == "initial-arrays"


@pytest.mark.parametrize("name", ["IFCA", "DPSGD"])
def test_the_error_about_clients_of_another_app_names_the_remedy(name: str) -> None:
    with pytest.raises(SettingsError, match='clientapp "flwr_frl'):
        run(OURS.format(name), f"{name}()")


# Arguments of Flower's FedAvg


@pytest.mark.parametrize(
    ("fraction", "least", "evaluated"),
    [(1.0, 1, 4), (0.5, 1, 2), (0.5, 3, 3), (0.1, 1, 1), (0.1, 9, 4), (0.0, 2, 0)],
)
def test_fraction_evaluate_and_min_evaluate_nodes(
    fraction: float, least: int, evaluated: int
) -> None:
    arguments = f"fraction_evaluate={fraction}, min_evaluate_nodes={least}"
    result = run(OURS.format("FedAvg"), f"FedAvg({arguments})")
    metrics = result.evaluate_metrics_clientapp.values()
    assert [m["evaluated"] for m in metrics] == [evaluated] * len(metrics)
    assert all(("eval_acc" in m) == (evaluated > 0) for m in metrics)


# Our ClientApp in another app


def test_unknown_keys_of_another_app_are_ignored_by_our_clients(caplog) -> None:
    config = {**CONFIG, "algorithm": "fedavg", "classes-per-client": 5}
    grid = InlineGrid(make_app(config), N)
    initial = FedAvg().initialize(grid)
    for server in FlowerFedAvg(), FedAvg():
        result = server.start(grid, initial, num_rounds=1)
        assert result.arrays.keys() == initial.keys()
        assert result.train_metrics_clientapp
    assert warnings(caplog) == []


# What happens to clients of another app


def changed_app(mod: Callable[..., Message]) -> ClientApp:
    """Return the unchanged ClientApp, whose replies a mod sees or changes."""
    module = import_module("templateapp.client_app")
    app = ClientApp(mods=[mod])
    app.train()(module.train)
    app.evaluate()(module.evaluate)
    return app


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


ALL = "fraction_train=1.0, fraction_evaluate=fraction_evaluate"


def test_personal_arrays_of_an_unchanged_client_app_stay_on_the_server(caplog):
    seen: dict[tuple[str, int], list[dict[str, np.ndarray]]] = {}

    def noting(message: Message, context: Context, call: Any) -> Message:
        kind, node = message.metadata.message_type, context.node_config["partition-id"]
        for way in "sent", "back":
            if "arrays" in message.content:
                arrays = values_of(message.content["arrays"])
                seen.setdefault((f"{kind} {way}", node), []).append(arrays)
            message = call(message, context) if way == "sent" else message
        return message

    strategy = f'FedPer(personal=("fc2.",), {ALL})'
    result = run(OURS.format("FedPer"), strategy, changed_app(noting))
    assert warnings(caplog) == []
    heads, first = {}, []
    for node in range(N):
        sent, back, tested = (
            np.array([arrays["fc2.weight"] for arrays in seen[kind, node]])
            for kind in ("train sent", "train back", "evaluate sent")
        )
        # A client trains and tests its own head, as it last returned it.
        np.testing.assert_array_equal(sent[1:], back[:-1])
        np.testing.assert_array_equal(tested, back)
        heads[node], initial = back[-1], sent[0]
        first.append(seen["train back", node][-1]["fc1.weight"])
    assert not any(np.array_equal(heads[0], heads[node]) for node in range(1, N))
    mean = np.mean(np.float64(first), axis=0)
    np.testing.assert_allclose(weights(result)["fc1.weight"], mean, atol=1e-6)
    # New clients would receive the initial head.
    np.testing.assert_array_equal(weights(result)["fc2.weight"], initial)


@pytest.mark.parametrize(
    "strategy",
    [
        'FedPer(personal=("fc9.",))',
        'FLUTE(personal=("fc2.",))',
        'FedPer(personal=("fc2.",), server_dp_noise=1.0, server_dp_clip=1.0, '
        "server_dp_delta=1e-5)",
    ],
)
def test_invalid_personal_arrays_are_refused_before_training(strategy: str) -> None:
    kinds: list[str] = []

    def noting(message: Message, context: Context, call: Any) -> Message:
        kinds.append(message.metadata.message_type)
        return call(message, context)

    with pytest.raises(SettingsError) as caught:
        run(OURS.format("FLUTE, FedPer"), strategy, changed_app(noting))
    assert caught.value.code == "personal"
    assert "train" not in kinds


@pytest.mark.parametrize(
    "name", ["FedRep", "Ditto", "FedAMP", "FFALoRA", "FedSALoRA", "FedAvg"]
)
def test_one_warning_if_the_client_app_is_not_the_algorithm_s(name, caplog):
    run(OURS.format(name), f"{name}({ALL})")
    lines = [line for line in warnings(caplog) if "FedPer(personal=('fc2.',))" in line]
    assert len(lines) == len(warnings(caplog)) == (name != "FedAvg")


def test_arrays_from_an_evaluation_and_lists_of_metrics_are_left_out():
    def returning_more(message: Message, context: Context, call: Any) -> Message:
        reply = call(message, context)
        if message.metadata.message_type == "evaluate":
            reply.content["arrays"] = message.content["arrays"]
        else:
            node = int(context.node_config["partition-id"])
            reply.content["metrics"]["train_accuracy"] = node / 10
            reply.content["metrics"]["by-class"] = [0.5, 1.0]
        return reply

    app = changed_app(returning_more)
    result = run(OURS.format("FedAvg"), f"FedAvg({ALL})", app)
    rounds = CONFIG["num-server-rounds"]
    for metrics in result.evaluate_metrics_clientapp.values():
        assert (metrics["evaluated"], metrics["evaluation-rejected"]) == (N, 0)
    theirs = run(IMPORT, STRATEGY, app).train_metrics_clientapp[rounds]
    ours = result.train_metrics_clientapp[rounds]
    # The sizes of the clients are 1 : 2 : 3 : 4.
    assert ours["train_accuracy"] == pytest.approx(0.2)
    assert theirs["train_accuracy"] == pytest.approx(0.2)
    assert "by-class" not in ours


def test_ffa_lora_keeps_the_initial_a_of_another_app() -> None:
    def renamed(arrays: ArrayRecord, old: str, new: str) -> ArrayRecord:
        return ArrayRecord({n.replace(old, new): a for n, a in arrays.items()})

    def with_adapters(message: Message, context: Context, call: Any) -> Message:
        former = message.content["arrays"]
        message.content["arrays"] = renamed(former, "lora_A", "fc1")
        reply = call(message, context)
        if "arrays" in reply.content:
            reply.content["arrays"] = renamed(reply.content["arrays"], "fc1", "lora_A")
        return reply

    net = import_module("templateapp.task").Net()
    initial = renamed(ArrayRecord(net.state_dict()), "fc1", "lora_A")
    grid = ConnectedGrid(changed_app(with_adapters), N, CONFIG)
    config = ConfigRecord({"lr": 0.1})
    after = FFALoRA().start(grid, initial, 1, train_config=config).arrays
    for name, array in values_of(initial).items():
        same = np.array_equal(after[name].numpy(), array)
        assert same == ("lora_A" in name)


def test_new_arguments_of_start_reach_flower(monkeypatch) -> None:
    def start(self: Any, grid: Any, *args: Any, **kwargs: Any) -> Result:
        assert isinstance(grid, Inbox)
        return Result(arrays=(grid.longest, kwargs["should_stop"]))

    monkeypatch.setattr(FlowerStrategy, "start", start)
    grid = ConnectedGrid(client_app(), N, CONFIG)
    more = {"timeout": 7.0, "should_stop": "it"}
    started = FedRep().start(grid, ArrayRecord(), 3, **more)
    assert started.arrays == (7, "it")
