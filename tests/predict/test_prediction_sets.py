"""Prediction sets beside the predictions of a client's model."""

import json

import numpy as np
import pytest
from animals import CLASSES, settings_of, train_on
from refusals import code_of

from flwr_frl.predict import load_model, load_run, personalize
from flwr_frl.running import run

WITH_SETS = {"validation_fraction": 0.5, "coverage": 0.6, "evaluate_last": 1}


def entries(output):
    return json.loads((output / "clients.json").read_text())


def assert_same_sets(predictor, folder, reported):
    """Check coverage and size of the sets of a folder's test images."""
    images = sorted((folder / "test").glob("*/*.png"))
    sets = predictor.sets(predictor(images))
    pairs = zip(sets, images, strict=True)
    covered = np.mean([path.parent.name in each for each, path in pairs])
    assert covered == pytest.approx(reported["coverage"])
    assert np.mean([*map(len, sets)]) == pytest.approx(reported["set-size"])


@pytest.mark.parametrize("algorithm", ["fedrep", "fedavg-ft", "knn-per"])
def test_sets_have_the_reported_coverage_and_size(algorithm, folders, tmp_path):
    settings = settings_of(tmp_path, data_dir=str(folders), **WITH_SETS)
    run(algorithm, {**settings, "algorithm": algorithm}, "inline")
    output = tmp_path / "results" / algorithm
    for client, folder in zip(entries(output), sorted(CLASSES), strict=True):
        predictor = load_run(output, client, data_dir=folders)
        assert_same_sets(predictor, folders / folder, entries(output)[client])


def test_devices_keep_their_validation_set(folders, tmp_path):
    settings = settings_of(tmp_path, algorithm="fedrep", **WITH_SETS)
    output = train_on({name: folders / name for name in CLASSES}, settings, tmp_path)
    for name in CLASSES:
        # The threshold is not in the state file.
        where, data = (output, name, tmp_path / name), folders / name
        assert code_of(load_run, *where) == "coverage"
        without = load_run(*where, coverage=0.0)
        assert code_of(without.sets, without(data / "test")) == "coverage"
        predictor = load_run(*where, data_dir=data)
        assert_same_sets(predictor, data, entries(output)[name])
    file, image = str(tmp_path / "model.safetensors"), str(data / "test/dog/0.png")
    predictor.export(file)
    assert load_model(file).calibrated == predictor.calibrated
    loaded = load_model(file)
    assert loaded.sets(loaded(image)) == predictor.sets(predictor(image))
    # A device that comes later fits its head without its validation set.
    where = "late", tmp_path / "late"
    late = personalize(output, data, *where)
    predictor = load_run(output, *where, data_dir=data)
    assert_same_sets(predictor, data, late.metrics)
