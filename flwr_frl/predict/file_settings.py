"""Decide which settings of a checkpoint or an exported model are used.

Such a file may come from a stranger. Code, paths and addresses that only the file names
are not used, and neither are large sizes.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from flwr_frl.clients.algorithms import client_class
from flwr_frl.common.settings import (
    Setting,
    Settings,
    declared,
    defaults,
    facts,
    fallbacks,
    is_path,
    require,
    resolve,
    unknown,
)
from flwr_frl.strategies.algorithms import strategy_class
from flwr_frl.task.tasks import GENERATED, IN_FOLDERS, model_settings

# A string of a custom class's setting that cannot be a path, an address or code.
WORDS = re.compile(r"[\w\s,;=+-]*")
# Largest integer that is used, in general and for some settings: all images are scaled
# to image-size before the model shows whether it fits.
LARGEST = 10**6
LARGEST_OF = {"image-size": 512, "seed": 2**63}
# Settings with an option on the command line; --run-config names all others.
FLAGS = ("task", "algorithm", "data-dir")


class FileSettings(NamedTuple):
    """The usable settings of a file.

    Parameters
    ----------
    settings : mapping
        All settings to use, with fallbacks or defaults in place of withheld ones.
    withheld : dict of str to setting
        Values that only the file names and that are not used, by setting.
    """

    settings: Settings
    withheld: Mapping[str, Any]

    @classmethod
    def of(cls, settings: Mapping[str, Any], given: Mapping[str, Any]) -> Self:
        """Separate the settings of a file into usable and withheld ones.

        Parameters
        ----------
        settings : mapping
            Settings in the file.
        given : mapping
            Settings that the user names, with ``-`` or ``_``; paths may be `Path`.
            A setting that may name code must equal the file's; any other replaces it.

        Raises
        ------
        SettingsError
            If the user names an unknown setting, or different code than the file.
        """
        named: dict[str, Setting] = {
            name.replace("_", "-"): os.fspath(v) if isinstance(v, os.PathLike) else v
            for name, v in given.items()
        }
        for name, value in named.items():
            if name not in settings and name not in defaults():
                raise unknown("setting", name, {*settings, *defaults()})
            if name in facts("code"):
                in_file = settings.get(name, defaults().get(name))
                require(value == in_file, name, value, f"that of the file, {in_file!r}")
        mine = {n: v for n, v in settings.items() if n in named or _is_harmless(n, v)}
        withheld = {n: v for n, v in settings.items() if n not in mine}
        replaced = {n: v for n, v in fallbacks().items() if n in withheld}
        resolved = resolve({**mine, **replaced, **named}, strict=False)
        return cls(resolved, withheld)

    def need(self, names: Iterable[str]) -> None:
        """Raise `SettingsError` if one of these settings is withheld."""
        for name in sorted(self.withheld.keys() & {*names}):
            option = f"--{name}" if name in FLAGS else f"--run-config '{name}=...'"
            python = f"{name.replace('-', '_')}=... in Python"
            allowed = (
                f"you to name it, too, by {option} or {python}: a file alone may not"
            )
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
        task = str(self.settings["task"])
        unused = {*fallbacks()}
        if task in GENERATED:
            unused.add("data-dir")
        # A file has all arrays of a trained model, except for a frozen backbone.
        if self.settings["adapters"] == "none":
            unused.add("weights")
        self.need({"num-clients", *model_settings(task)} - unused)


def _is_harmless(name: str, value: Any) -> bool:
    """Return whether a setting has no effect outside the process."""
    if isinstance(value, int | float):
        return isinstance(value, float) or abs(value) <= LARGEST_OF.get(name, LARGEST)
    if not isinstance(value, str):
        return False
    if value == defaults().get(name):
        return True
    if name == "task":
        return value in (*GENERATED, *IN_FOLDERS)
    if name in facts("code"):
        return not is_path(value)
    if name in defaults():
        return name in facts("safe")
    return WORDS.fullmatch(value) is not None
