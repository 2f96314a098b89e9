"""What a run has left on the server: the shared arrays, and who has trained."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from flwr.app import Context, RecordDict, UserConfig
from safetensors import SafetensorError, safe_open

from flwr_frl.clients.algorithms import check_named, complete
from flwr_frl.clients.base import Client, digest_of
from flwr_frl.clients.device.card import ModelCard, check_size
from flwr_frl.clients.device.file_settings import Followed, followed
from flwr_frl.clients.device.identity import quoted, state_directory
from flwr_frl.clients.device.parameter_groups import HEAD, Tensors
from flwr_frl.task.checkpoint import FILE, ChecksumError, read
from flwr_frl.task.settings import Settings, SettingsError, resolve
from flwr_frl.task.tasks.image import default_model

# What reading something else than a run's checkpoint raises.
NOT_WRITTEN = (
    *(LookupError, TypeError, ValueError, AttributeError),
    *(ArithmeticError, RecursionError),
)


class TrainedRun(NamedTuple):
    """What the server's checkpoint says of a run.

    Parameters
    ----------
    path : Path
        The checkpoint.
    settings : mapping
        All settings that may be used.
    followed : Followed
        The same settings, and those that the file alone names.
    data_dir : str
        The run's ``data-dir`` as the file has it, which may not be used.
    acknowledged : dict of str to int
        The last round of each client that has trained.
    token : str
        The run's name.
    labels : dict of str to str
        What simulated clients' folders are called, by the clients' names.
    server_round : int
        The last round.
    classes : str
        Digest of the classes' names; empty where it is not known.
    arrays : dict of str to Tensor
        The shared ones.
    state : dict of str to Tensor
        The strategy's own.
    own_partition : str
        The import path of what split the simulated clients' examples; "" for one that
        is built in, or that the user has named, too.
    """

    path: Path
    settings: Settings
    followed: Followed
    data_dir: str
    acknowledged: dict[str, int]
    token: str
    labels: dict[str, str]
    server_round: int
    classes: str
    arrays: Tensors
    state: Tensors
    own_partition: str

    def check_data(self, held: Tensors, without: Iterable[str] = ()) -> None:
        """Raise `SettingsError` unless the run's task may be made and read its data.

        To be called before that: all images are brought to the file's ``image-size``.

        Parameters
        ----------
        held : dict of str to Tensor
            The arrays of the model, whose size the images must have.
        without : iterable of str
            As for `Followed.need_task`.
        """
        self.followed.need_task(without)
        _check_image_size(self.settings, held)

    def directory_of(self, client: str, state_dir: str) -> Path | None:
        """Return where a client keeps its own part: a device, or in simulation."""
        if not state_dir:
            return self.path.parent / "clients" / quoted(client)
        node: UserConfig = {"client-name": client, "state-dir": state_dir}
        context = Context(0, 0, node, RecordDict(), {})
        return state_directory(context, self.settings, self.token)


def read_run(path: Path, named: Settings) -> TrainedRun:
    """Read a server's checkpoint, or that in a directory.

    Parameters
    ----------
    path : Path
        The file or the directory.
    named : mapping
        The settings that the user names, as for `followed`.

    Raises
    ------
    SettingsError
        If it is missing or damaged, or names code that the user does not name.
    """
    # Of a name that is too long, too.
    path = path / FILE if os.path.isdir(path) else path
    try:
        run, arrays, state = read(path)
        values = run["values"]
        written = dict(run["settings"])
        kept = followed(written, named)
        check_named(kept)
        own = str(kept.withheld.get("partition", ""))
        return TrainedRun(
            path,
            complete(resolve(kept.settings, strict=False)),
            kept,
            str(written.get("data-dir", "")),
            {str(n): int(r) for n, r in values["acknowledged"].items()},
            str(values["run"]),
            {str(n): str(own) for n, own in values.get("labels", {}).items()},
            int(run.get("round", 1)),
            str(values.get("classes", "")),
            {name: torch.from_numpy(array) for name, array in arrays.items()},
            {name: torch.from_numpy(array) for name, array in state.items()},
            own,
        )
    except (SafetensorError, OSError, ChecksumError) as error:
        raise _unreadable("checkpoint", path, error) from None
    except NOT_WRITTEN as error:
        if isinstance(error, SettingsError):
            raise SettingsError(f"{str(path)!r}: {error}") from None
        raise SettingsError(
            f"checkpoint is {str(path)!r}; it must be one that a run has written"
        ) from None


def check_classes(
    kind: type[Client], run: TrainedRun, classes: Iterable[str], data_dir: str
) -> None:
    """Raise `SettingsError` if a shared head is for other classes than the data's."""
    names = tuple(map(str, classes))
    if HEAD in kind.shared and run.classes not in ("", digest_of(names)):
        raise SettingsError(
            f"data-dir {data_dir!r} has the classes {', '.join(names)}; they must be "
            "those of the training, whose head is shared"
        )


def _check_image_size(settings: Settings, arrays: Tensors) -> None:
    size, task = int(settings["image-size"]), str(settings["task"])
    if size == 0 or task not in ("image-folder", "femnist"):
        return
    model = str(settings["model"]) or default_model(task, size, size)
    head_layers, head = int(settings["head-layers"]), str(settings["model-head"])
    own = {n: a for n, a in arrays.items() if n.startswith("representation.")}
    reasons = []
    for channels in (1, 3):
        shape, classes = (channels, size, size), ("a", "b")
        card = ModelCard(model, shape, classes, (), (), head_layers, head)
        try:
            check_size(card, own)
        except SettingsError as error:
            reasons.append(error)
    if len(reasons) == 2:
        raise SettingsError(f"image-size is {size}, and {reasons[1]}")


def read_tensors(path: Path, name: str) -> tuple[dict[str, str], Tensors]:
    """Return metadata and tensors of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            return about, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _unreadable(name, path, error) from None


def _unreadable(name: str, path: Path, error: Exception) -> SettingsError:
    reason = str(error).splitlines()[0]
    return SettingsError(f"{name} {str(path)!r} cannot be read: {reason}")
