"""What a run has left on the server: the shared arrays, and who has trained."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from flwr.app import Context, RecordDict, UserConfig
from safetensors import SafetensorError, safe_open

from clients.algorithms import complete
from clients.base import Client, digest_of
from clients.device.identity import quoted, state_directory
from clients.device.slots import HEAD, Tensors
from clients.device.task_card import trusted
from task.checkpoint import FILE, ChecksumError, read
from task.settings import Settings, SettingsError, is_path, resolve


class TrainedRun(NamedTuple):
    """What the server's checkpoint says of a run.

    Parameters
    ----------
    path : Path
        The checkpoint.
    settings : mapping
        All settings.
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
    acknowledged: dict[str, int]
    token: str
    labels: dict[str, str]
    server_round: int
    classes: str
    arrays: Tensors
    state: Tensors
    own_partition: str

    def directory_of(self, client: str, state_dir: str) -> Path | None:
        """Return where a client keeps its own part: a device, or in simulation."""
        if not state_dir:
            return self.path.parent / "clients" / quoted(client)
        node: UserConfig = {"client-name": client, "state-dir": state_dir}
        context = Context(0, 0, node, RecordDict(), {})
        return state_directory(context, self.settings, self.token)


def read_run(path: Path, task: str = "", partition: str = "") -> TrainedRun:
    """Read a server's checkpoint, or that in a directory.

    Raises `SettingsError` if it is missing or damaged, or as `trusted`.
    """
    # Of a name that is too long, too.
    path = path / FILE if os.path.isdir(path) else path
    try:
        run, arrays, state = read(path)
        values = run["values"]
        settings = trusted(dict(run["settings"]), task, partition)
        own = str(run["settings"].get("partition", ""))
        return TrainedRun(
            path,
            complete(resolve(settings, strict=False)),
            {str(n): int(r) for n, r in values["acknowledged"].items()},
            str(values["run"]),
            {str(n): str(own) for n, own in values.get("labels", {}).items()},
            int(run.get("round", 1)),
            str(values.get("classes", "")),
            {name: torch.from_numpy(array) for name, array in arrays.items()},
            {name: torch.from_numpy(array) for name, array in state.items()},
            own if is_path(own) and not partition else "",
        )
    except (SafetensorError, OSError, ChecksumError) as error:
        raise _unreadable("checkpoint", path, error) from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
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
