"""Arguments and missing packages of third-party partitioners, without the packages."""

from importlib.util import find_spec

import numpy as np
import pytest

from flwr_frl.task.data.partitioners import parse_arguments, partition_rows
from flwr_frl.task.data.partitions import PartitionSettings, partition

NATURAL = "flwr_datasets.partitioner:NaturalIdPartitioner"


def test_arguments_are_json_or_strings():
    text = "by=writer_id alpha=0.3 sizes=[1,2] shuffle=false name='a b' of=a=b"
    assert parse_arguments(text) == {
        "by": "writer_id",
        "alpha": 0.3,
        "sizes": [1, 2],
        "shuffle": False,
        "name": "a b",
        "of": "a=b",
    }
    assert parse_arguments("") == {}


@pytest.mark.parametrize(
    "text", ["alpha", "=3", "sizes=[1, 2]", "a-b=1", "x='", "seed=null"]
)
def test_invalid_arguments_are_an_error(code_of, text):
    assert code_of(lambda: parse_arguments(text)) == "partitioner-arguments"


LABELS = np.zeros(4, np.int64)


@pytest.mark.parametrize(
    ("package", "call"),
    [
        (
            "datasets",
            lambda: partition(LABELS, LABELS, 2, PartitionSettings(0, NATURAL)),
        ),
        ("flwr_datasets", lambda: partition_rows(NATURAL, "", None, 2, 0)),
    ],
)
def test_a_missing_package_is_an_error(code_of, monkeypatch, package, call):
    lacking = lambda name: None if name == package else find_spec(name)  # noqa: E731
    monkeypatch.setattr("flwr_frl.common.settings.find_spec", lacking)
    assert code_of(call) == "missing-package"
