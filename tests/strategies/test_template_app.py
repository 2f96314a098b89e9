"""An app of Flower's PyTorch template with two changed lines in server_app.py."""

import logging
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from flwr_frl.clients.client_app import make_app
from flwr_frl.common.settings import SettingsError
from flwr_frl.strategies import FedAvg
from flwr_frl.strategies.grids.nodes import ANSWERS_NO_QUERY
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
SENTENCE = GUIDE.split("with an unchanged ClientApp: ")[1].split(",\nand ")[0]
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
    "arguments",
    [
        'weighting="examples"',
        'weighted_by_key="num-examples"',
        'weighted_by_key="num-examples", min_evaluate_nodes=2',
    ],
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


@pytest.mark.parametrize(
    ("name", "needed"),
    [("FLUTE", ["'classes'", "'properties'", "'head'"]), ("SCAFFOLD", ["'is-change'"])],
)
def test_error_explains_required_changes_of_the_client_app(
    name: str, needed: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        run(OURS.format(name), f"{name}(fraction_evaluate=fraction_evaluate)")
    assert "\n" not in str(caught.value)
    for text in needed:
        assert text in str(caught.value)


# Query handlers


def test_only_one_node_is_queried_without_a_query_handler(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kinds = []

    def counting(message: Message, context: Context) -> Message:
        kinds.append(message.metadata.message_type)
        return client_app()(message, context)

    with caplog.at_level(logging.INFO, "flwr"):
        run(OURS.format("FedAvg"), "FedAvg()", counting)  # type: ignore[arg-type]
    assert kinds.count("query") == 1
    assert len([m for m in caplog.messages if "no query handler" in m]) == 1
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_traceback_of_a_missing_query_handler_is_hidden(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("flwr")

    def logging_like_flowers_simulation(message: Message, context: Context) -> Message:
        try:
            return client_app()(message, context)
        except Exception as error:
            logger.error("Traceback\n%s", error)
            raise

    app: ClientApp = logging_like_flowers_simulation  # type: ignore[assignment]
    run(OURS.format("FedAvg"), "FedAvg()", app)
    assert not [m for m in caplog.messages if ANSWERS_NO_QUERY in m]
    logger.error(ANSWERS_NO_QUERY)
    # The traceback is hidden only during queries.
    assert [m for m in caplog.messages if ANSWERS_NO_QUERY in m]


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


def test_seed_determines_the_evaluated_clients() -> None:
    samples = []
    for seed in (1, 1, 2):
        evaluation = FedAvg(fraction_evaluate=0.25, seed=seed).evaluation
        rounds = [evaluation.sample(r, list(range(40))) for r in range(1, 9)]
        assert all(sorted(nodes) == nodes and len(nodes) == 10 for nodes in rounds)
        assert len({tuple(nodes) for nodes in rounds}) == 8
        samples.append(rounds)
    assert samples[0] == samples[1] != samples[2]


def renamed() -> ClientApp:
    """Return the app with other keys, and partition + 1 as metric ``votes``."""
    app, template = ClientApp(), client_app()

    def changed(message: Message, context: Context) -> Message:
        content = message.content
        content["arrays"], content["config"] = content["w"], content["c"]
        reply = template(message, context)
        metrics = reply.content["metrics"]
        assert isinstance(metrics, MetricRecord)
        votes = int(context.node_config["partition-id"]) + 1
        metrics["votes"] = votes
        metrics["constant"] = float(votes**2)
        if "arrays" in reply.content:
            reply.content["w"] = reply.content.pop("arrays")
        return reply

    app.train()(changed)
    app.evaluate()(changed)
    return app


def test_keys_and_metric_functions_work_as_in_flower() -> None:
    arguments = (
        'fraction_train=1.0, weighted_by_key="votes", arrayrecord_key="w", '
        'configrecord_key="c", train_metrics_aggr_fn=by_votes, '
        "evaluate_metrics_aggr_fn=by_votes"
    )
    keys: list[str] = []

    def by_votes(contents: list[RecordDict], key: str) -> MetricRecord:
        keys.append(key)
        mean = aggregate_metricrecords(contents, key)
        return MetricRecord({f"own-{name}": value for name, value in mean.items()})

    module = ModuleType("by_votes")
    vars(module).update(by_votes=by_votes, FedAvg=FedAvg, Flower=FlowerFedAvg)
    sys.modules["by_votes"] = module
    try:
        imported = "from by_votes import by_votes, FedAvg, Flower"
        ours = run(imported, f"FedAvg({arguments})", renamed())
        theirs = run(imported, f"Flower({arguments})", renamed())
    finally:
        del sys.modules["by_votes"]
    assert set(keys) == {"votes"}
    for name, array in weights(theirs).items():
        np.testing.assert_allclose(weights(ours)[name], array, rtol=1e-5, atol=1e-6)
    # (1 * 1 + 2 * 4 + 3 * 9 + 4 * 16) / 10
    for metrics in (
        ours.train_metrics_clientapp[1],
        ours.evaluate_metrics_clientapp[1],
    ):
        assert metrics["own-constant"] == pytest.approx(10.0)
    assert ours.evaluate_metrics_clientapp[1]["constant"] == pytest.approx(10.0)
    assert "votes" not in ours.evaluate_metrics_clientapp[1]


@pytest.mark.parametrize("votes", [-1.0, None])
def test_a_reply_without_a_valid_weight_is_rejected(votes: float | None) -> None:
    app, template = ClientApp(), client_app()

    def train(message: Message, context: Context) -> Message:
        reply = template(message, context)
        first = context.node_config["partition-id"] == 0
        value = votes if first else 1.0
        if value is not None:
            reply.content["metrics"]["votes"] = value
        return reply

    app.train()(train)
    app.evaluate()(train)
    arguments = 'fraction_train=1.0, weighted_by_key="votes"'
    result = run(OURS.format("FedAvg"), f"FedAvg({arguments})", app)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["clients"], metrics["rejected"]) == (N - 1, 1)
    assert result.evaluate_metrics_clientapp[1]["evaluation-rejected"] == 1


# Our ClientApp in another app


def test_unknown_keys_of_another_app_are_ignored_by_our_clients() -> None:
    config = {**CONFIG, "algorithm": "fedavg", "classes-per-client": 5}
    grid = InlineGrid(make_app(config), N)
    initial = FedAvg().initialize(grid)
    for server in FlowerFedAvg(), FedAvg():
        result = server.start(grid, initial, num_rounds=1)
        assert result.arrays.keys() == initial.keys()
        assert result.train_metrics_clientapp
