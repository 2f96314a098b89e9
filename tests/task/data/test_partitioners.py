"""Arguments and missing packages of third-party partitioners, without the packages."""

import numpy as np
import pytest
from refusals import code_of, uninstall

from flwr_frl.task.data.partitioners import parse_arguments, partition_rows
from flwr_frl.task.data.partitions import PartitionSettings, partition

NATURAL = "flwr_datasets.partitioner:NaturalIdPartitioner"


def test_arguments_are_json_or_strings():
    text = "by=writer_id alpha=0.3 sizes=[1,2] shuffle=false name='a b' of=a=b"
    expected = {"by": "writer_id", "alpha": 0.3, "sizes": [1, 2], "shuffle": False}
    assert parse_arguments(text) == {**expected, "name": "a b", "of": "a=b"}
    assert parse_arguments("") == {}


@pytest.mark.parametrize(
    "text", ["alpha", "=3", "sizes=[1, 2]", "a-b=1", "x='", "seed=null"]
)
def test_invalid_arguments_are_an_error(text):
    assert code_of(parse_arguments, text) == "partitioner-arguments"


LABELS = np.zeros(4, np.int64)


def test_a_missing_package_is_an_error(monkeypatch):
    uninstall(monkeypatch, "datasets")
    settings = PartitionSettings(0, NATURAL)
    assert code_of(partition, LABELS, LABELS, 2, settings) == "missing-package"
    uninstall(monkeypatch, "flwr_datasets")
    assert code_of(partition_rows, NATURAL, "", None, 2, 0) == "missing-package"
