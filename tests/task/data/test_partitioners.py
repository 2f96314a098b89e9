"""Arguments of somebody's partitioner, and what is missing; no library is needed."""

import re
from importlib.util import find_spec

import numpy as np
import pytest

from flwr_frl.task.data.partitioners import dealt, parsed
from flwr_frl.task.data.partitions import PartitionSettings, partition
from flwr_frl.task.settings import SettingsError, is_path

NATURAL = "flwr_datasets.partitioner:NaturalIdPartitioner"


def test_arguments_are_json_or_texts():
    text = "by=writer_id alpha=0.3 sizes=[1,2] shuffle=false name='a b' of=a=b"
    assert parsed(text) == {
        "by": "writer_id",
        "alpha": 0.3,
        "sizes": [1, 2],
        "shuffle": False,
        "name": "a b",
        "of": "a=b",
    }
    assert parsed("") == {}


@pytest.mark.parametrize("text", ["alpha", "=3", "sizes=[1, 2]", "a-b=1", "x='"])
def test_bad_arguments(text):
    line = f"partitioner-arguments is {text!r}; it must be 'name=value ...'"
    with pytest.raises(SettingsError, match=re.escape(line)):
        parsed(text)


def test_a_partition_that_each_process_draws_anew_is_refused():
    with pytest.raises(SettingsError, match="it must be with another seed than null"):
        parsed("seed=null")


def test_a_name_or_a_path():
    assert PartitionSettings(partition=NATURAL).idle().keys() == {
        "classes-per-client",
        "dirichlet-alpha",
        "size-sigma",
    }
    assert "partitioner-arguments" in PartitionSettings(partition="iid").idle()
    line = "partition is 'shard'; it must be shards, .* iid or package.module:Class"
    with pytest.raises(SettingsError, match=line):
        PartitionSettings(partition="shard")
    assert is_path(NATURAL)
    # A task of Hugging Face's.
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
            lambda: dealt(NATURAL, "", None, 2, 0),
        ),
    ],
)
def test_what_is_missing_is_asked_for(monkeypatch, package, what, call):
    lacking = lambda name: None if name == package else find_spec(name)  # noqa: E731
    monkeypatch.setattr("flwr_frl.task.allowed.find_spec", lacking)
    line = f"{what} needs the package {package!r}, which is missing: "
    with pytest.raises(SettingsError) as raised:
        call()
    assert str(raised.value) == f"{line}pip install 'flwr-frl[hf]'"
