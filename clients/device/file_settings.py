"""Decide which settings of a checkpoint or an exported model may be used.

Such a file may come from a stranger. Code, paths and addresses that only the file names
are not used, and neither are large sizes. `flwr_frl.predict` and
`flwr_frl.predict.personalize` both apply the same rule, `followed`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flwr_frl.common.settings import (
    Setting,
    Settings,
    SettingsError,
    defaults,
    facts,
    fallbacks,
    is_path,
    require,
    resolve,
    unknown,
)
from flwr_frl.task.tasks import GENERATED, IN_FOLDERS, TASKS, model_settings

# A string of a custom class's setting that cannot be a path, an address or code.
WORDS = re.compile(r"[\w\s,;=+-]*")
# Largest integer that is used, except for the seed.
LARGEST = 10**6
# Command-line options of both commands; --run-config names all other settings.
FLAGS = ("task", "algorithm", "data-dir")


class Followed(NamedTuple):
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

    def need(self, names: Iterable[str]) -> None:
        """Raise `SettingsError` if a required setting is withheld.

        The message shows the option with which the user can allow it.
        """
        for name in sorted(self.withheld.keys() & {*names} - fallbacks().keys()):
            value = self.withheld[name]
            is_code = name in facts("code") and is_path(value)
            use = "whose code is run" if is_code else "which is used"
            option, python = f"--run-config '{name}=...'", f"named={{{name!r}: ...}}"
            if name in FLAGS:
                option, python = f"--{name}", f"{name.replace('-', '_')}=..."
            raise SettingsError(
                f"its {name} is {value!r}, {use} only where you name it, too: by "
                f"{option}, or {python} in Python"
            )

    def need_task(self, without: Iterable[str]) -> None:
        """Require the task and the settings that it declares, except ``without``."""
        self.need(["task"])
        task = str(self.settings["task"])
        # Generated data sets declare data-dir but do not read it.
        unread = {"data-dir"} if task in GENERATED else set[str]()
        required = {*model_settings(task), "num-clients"}
        self.need(required - unread - {*without})


def followed(settings: Mapping[str, Any], named: Settings) -> Followed:
    """Separate the settings of a file into usable and withheld ones.

    Numbers and strings that only choose among built-in options are used. Values with
    an effect outside the process (an import path, a path, an address, a task that
    downloads its data) and integers above `LARGEST` are withheld unless the user names
    them as well.

    Parameters
    ----------
    settings : mapping
        Settings in the file.
    named : mapping
        Settings that the user names. Those that may name code must equal the file's;
        any other value replaces the file's.

    Raises
    ------
    SettingsError
        If the user names an unknown setting, or different code than the file.
    """
    for name, value in named.items():
        if name not in settings and name not in defaults():
            raise unknown("setting", name, {*settings, *defaults()})
        if name in facts("code"):
            in_file = settings.get(name, defaults().get(name))
            require(value == in_file, name, value, f"that of the file, {in_file!r}")
    withheld = {
        name: value
        for name, value in settings.items()
        if name not in named and _reaches_out(name, value, named)
    }
    usable = {n: v for n, v in settings.items() if n not in withheld}
    # No code is used in place of another one.
    replaced = {**dict.fromkeys(facts("code"), ""), **fallbacks()}
    replaced = {n: v for n, v in replaced.items() if n in withheld}
    settings = resolve({**usable, **replaced, **named}, strict=False)
    return Followed(settings, withheld)


def named_settings(others: Settings | None, **texts: str) -> dict[str, Setting]:
    """Collect the settings that a user names; an empty string names none.

    ``texts``, with ``_`` for ``-`` in the names, take precedence over ``others``.
    """
    nonempty = {name.replace("_", "-"): text for name, text in texts.items() if text}
    return {**(others or {}), **nonempty}


def _reaches_out(name: str, value: Any, named: Settings) -> bool:
    """Return whether a setting could have an effect outside the process."""
    if not isinstance(value, str):
        is_large = type(value) is int and abs(value) > LARGEST and name != "seed"
        return is_large or not isinstance(value, bool | int | float)
    if value == defaults().get(name):
        return False
    if name == "task":
        # If the user names a folder, it is read and nothing is downloaded.
        if value.startswith("hf:"):
            return not named.get("data-dir")
        return (
            is_path(value)
            or value.startswith("hf-text:")
            or (value in TASKS and value not in (*GENERATED, *IN_FOLDERS))
        )
    if name in facts("code"):
        return is_path(value)
    if name in defaults():
        # `resolve` refuses a string where a number belongs.
        return isinstance(defaults()[name], str) and name not in facts("safe")
    return WORDS.fullmatch(value) is None
