"""Third-party partitioners: arguments and missing packages, without the packages."""

from importlib.util import find_spec

import numpy as np
import pytest

from flwr_frl.task.data.partitioners import parse_arguments, partition_rows
from flwr_frl.task.data.partitions import PartitionSettings, partition
from flwr_frl.task.settings import SettingsError, is_path

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


@pytest.mark.parametrize("text", ["alpha", "=3", "sizes=[1, 2]", "a-b=1", "x='"])
def test_bad_arguments(code_of, text):
    assert code_of(lambda: parse_arguments(text)) == "partitioner-arguments"


def test_a_partition_without_a_seed_is_refused():
    with pytest.raises(SettingsError, match="another seed than null"):
        parse_arguments("seed=null")


def test_a_partition_is_a_name_or_an_import_path(code_of):
    assert PartitionSettings(partition=NATURAL).unused().keys() == {
        "classes-per-client",
        "dirichlet-alpha",
        "size-sigma",
    }
    assert "partitioner-arguments" in PartitionSettings(partition="iid").unused()
    assert code_of(lambda: PartitionSettings(partition="shard")) == "partition"
    assert is_path(NATURAL)
    # A task with a data set of Hugging Face.
    assert not is_path("hf:flwrlabs/femnist")


LABELS = np.zeros(4, np.int64)


@pytest.mark.parametrize(
    ("package", "what", "call"),
    [
        (
            "datasets",
            "a partitioner by its import path",
            lambda: partition(LABELS, LABELS, 1, 2, PartitionSettings(0, NATURAL)),
        ),
        (
            "flwr_datasets",
            f"partition {NATURAL!r}",
            lambda: partition_rows(NATURAL, "", None, 2, 0),
        ),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, package, what, call):
    lacking = lambda name: None if name == package else find_spec(name)  # noqa: E731
    monkeypatch.setattr("flwr_frl.task.allowed.find_spec", lacking)
    line = f"{what} needs the package {package!r}, which is missing: "
    with pytest.raises(SettingsError) as raised:
        call()
    assert raised.value.code == "missing-package"
    assert str(raised.value) == f"{line}pip install 'flwr-frl[hf]'"
