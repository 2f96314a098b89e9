"""Decide which settings of a checkpoint are used.

The file may come from a stranger. Code, paths and addresses that only the file names
are not used.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from flwr_frl.common.errors import require, unknown
from flwr_frl.common.settings import Resolved, defaults, facts, is_path, resolve
from flwr_frl.task.names import GENERATED, IN_FOLDERS

# Settings that a trained model does not need, and the values of withheld ones.
UNUSED = {"cache-dir": "", "metrics": "", "partition": "iid"}


def separate(
    settings: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[Resolved, dict[str, Any]]:
    """Separate the settings of a file into usable and withheld ones.

    Parameters
    ----------
    settings : mapping
        Settings in the file.
    given : mapping
        Settings that the user names, with ``-`` or ``_``, which replace those of the
        file; paths may be `Path`.

    Returns
    -------
    settings, withheld
        All settings to use, with values of `UNUSED` or defaults in place of withheld
        ones; and values that only the file names and that are not used.

    Raises
    ------
    SettingsError
        If the user names an unknown setting.
    """
    named: dict[str, Any] = {
        name.replace("_", "-"): os.fspath(v) if isinstance(v, os.PathLike) else v
        for name, v in given.items()
    }
    for name in named.keys() - settings.keys() - defaults().keys():
        raise unknown("setting", name, {*settings, *defaults()})
    mine = {n: v for n, v in settings.items() if n in named or _is_harmless(n, v)}
    withheld = {n: v for n, v in settings.items() if n not in mine}
    replaced = {n: v for n, v in UNUSED.items() if n in withheld}
    return resolve({**mine, **replaced, **named}, strict=False), withheld


def need(withheld: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise `SettingsError` if one of these settings is withheld."""
    for name in sorted(withheld.keys() & {*names}):
        allowed = f"it as an argument, too: {name.replace('-', '_')}=..."
        require(False, name, withheld[name], allowed)


def _is_harmless(name: str, value: Any) -> bool:
    """Return whether a setting has no effect outside the process."""
    if not isinstance(value, str):
        return isinstance(value, int | float)
    if value == defaults().get(name):
        return True
    if name == "task":
        return value in (*GENERATED, *IN_FOLDERS)
    if name in facts("code"):
        return not is_path(value)
    return name in facts("safe")
