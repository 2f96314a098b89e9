"""TensorBoard event files, read back record by record."""

import struct
from pathlib import Path

import pytest
from refusals import code_of
from tensorboardX.proto.event_pb2 import Event

from flwr_frl.results.trackers import About, TensorBoard


def events(folder: Path) -> list[Event]:
    """Return all events. A record is a length, a checksum, an event and a checksum."""
    found = []
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def curve(found: list[Event], name: str) -> list[tuple[int, float]]:
    return [
        (event.step, value.simple_value)
        for event in found
        for value in event.summary.value
        if value.tag == name
    ]


@pytest.fixture
def about(tmp_path):
    settings = {"seed": 7, "task": "digits", "learning-rate": 0.5}
    return About("fedrep", "abc", 0, tmp_path / "out" / "fedrep", settings)


def test_a_link_in_the_output_is_not_followed(tmp_path, about):
    (tmp_path / "theirs").mkdir()
    about.directory.mkdir(parents=True)
    (tmp_path / "out" / "tensorboard").symlink_to(tmp_path / "theirs")
    assert code_of(TensorBoard("").start, about) == "output"
    # A tracker address given by the user may be a link.
    TensorBoard(str(tmp_path / "out" / "tensorboard")).start(about)


def test_curves_settings_and_folder_are_recorded(tmp_path, about):
    tracker = TensorBoard("")
    tracker.start(about)
    tracker.add(1, {"accuracy": 0.25, "train-loss": 2.0})
    tracker.add(2, {"accuracy": 0.75})
    tracker.end(True, {"accuracy": 0.5})
    folder = tmp_path / "out" / "tensorboard" / "fedrep-abc"
    recorded = events(folder)
    assert curve(recorded, "accuracy") == [(1, 0.25), (2, 0.75)]
    assert curve(recorded, "train-loss") == [(1, 2.0)]
    assert curve(recorded, "result/accuracy") == [(2, 0.5)]
    values = {v.tag: v for event in recorded for v in event.summary.value}
    settings = values["_hparams_/session_start_info"].metadata.plugin_data.content
    for text in (b"learning-rate", b"digits", b"seed", b"out/fedrep"):
        assert text in settings


def test_resumed_run_replaces_repeated_steps(tmp_path, about):
    place = str(tmp_path / "elsewhere")
    first = TensorBoard(place)
    first.start(about)
    for i in (1, 2, 3):
        first.add(i, {"accuracy": i / 10})
    first.end(False, {})
    second = TensorBoard(place)
    second.start(About("fedrep", "abc", 2, about.directory, about.settings))
    second.add(3, {"accuracy": 0.5})
    second.end(True, {})
    recorded = events(tmp_path / "elsewhere" / "fedrep-abc")
    starts = [event.step for event in recorded if event.HasField("session_log")]
    # TensorBoard discards earlier values from step 3 on.
    assert starts == [3]
    assert curve(recorded, "accuracy")[-2:] == [(3, pytest.approx(0.3)), (3, 0.5)]
