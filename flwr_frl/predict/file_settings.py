"""Decide which settings of a checkpoint or an exported model are used.

Such a file may come from a stranger. Code, paths and addresses that only the file names
are not used.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from flwr_frl.clients.algorithms import client_class
from flwr_frl.common.settings import (
    Resolved,
    declared,
    defaults,
    facts,
    is_path,
    pyproject,
    require,
    resolve,
    unknown,
)
from flwr_frl.strategies.algorithms import strategy_class
from flwr_frl.task.names import GENERATED, IN_FOLDERS
from flwr_frl.task.tasks import model_settings

# A string of a custom class's setting that cannot be a path, an address or code.
WORDS = re.compile(r"[\w\s,;=+-]*")
# Settings with an option on the command line; --run-config names all others.
FLAGS = ("task", "algorithm", "data-dir")


class FileSettings(NamedTuple):
    """The usable settings of a file.

    Parameters
    ----------
    settings : Resolved
        All settings to use, with fallbacks or defaults in place of withheld ones.
    withheld : dict of str to setting
        Values that only the file names and that are not used, by setting.
    """

    settings: Resolved
    withheld: Mapping[str, Any]

    @classmethod
    def of(cls, settings: Mapping[str, Any], given: Mapping[str, Any]) -> Self:
        """Separate the settings of a file into usable and withheld ones.

        Parameters
        ----------
        settings : mapping
            Settings in the file.
        given : mapping
            Settings that the user names, with ``-`` or ``_``, which replace those of
            the file; paths may be `Path`.

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
        replaced = {n: v for n, v in _fallbacks().items() if n in withheld}
        return cls(resolve({**mine, **replaced, **named}, strict=False), withheld)

    def need(self, names: Iterable[str]) -> None:
        """Raise `SettingsError` if one of these settings is withheld."""
        for name in sorted(self.withheld.keys() & {*names}):
            option = f"--{name}" if name in FLAGS else f"--run-config '{name}=...'"
            python = f"{name.replace('-', '_')}=... in Python"
            allowed = f"you to name it, too, by {option} or {python}"
            require(False, name, self.withheld[name], allowed)

    def need_algorithm(self) -> None:
        """Raise `SettingsError` if the algorithm or its settings are withheld."""
        self.need(["algorithm"])
        # The algorithm looks at a task's class.
        if is_path(self.withheld.get("task", "")):
            self.need(["task"])
        # A strategy that wraps another one names it in a setting.
        self.need(facts("code") & {*declared(strategy_class(self.settings))})
        self.need(declared(client_class(self.settings)))

    def need_task(self) -> None:
        """Raise `SettingsError` if the task or its settings are withheld."""
        self.need(["task"])
        task, unused = str(self.settings["task"]), {*_fallbacks()}
        if task in GENERATED:
            unused.add("data-dir")
        # A file has all arrays of a trained model, except for a frozen backbone.
        if self.settings["adapters"] == "none":
            unused.add("weights")
        self.need({"num-clients", *model_settings(task)} - unused)


def _fallbacks() -> Mapping[str, Any]:
    """Return the values with which a trained model can do without a file's."""
    values: Mapping[str, Any] = pyproject()["tool"]["flwr-frl"]["fallbacks"]
    return values


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
    if name in defaults():
        return name in facts("safe")
    return WORDS.fullmatch(value) is not None
