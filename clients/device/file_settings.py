"""Which settings of a checkpoint, or of an exported model, are followed.

Such a file may come from a stranger. Nothing that it alone names is imported, read,
written or contacted, and no size that it alone names is allocated: `followed` is the
one rule for `flwr_frl.clients.predict` and `flwr_frl.clients.personalize`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flwr_frl.task.settings import (
    Setting,
    Settings,
    SettingsError,
    declared,
    defaults,
    is_path,
    require,
    unknown,
)
from flwr_frl.task.tasks import GENERATED, IN_FOLDERS, TASKS, task_maker

# Texts that choose among what is built in, or that name nothing outside the process.
PLAIN = frozenset(
    (
        *("aggregation", "transport", "weighting", "cohort", "device", "experiment"),
        *("model", "model-head", "client-models", "classes", "evaluate-on"),
        *("input-columns", "label-column", "train-split", "test-split", "data-subset"),
        *("emnist-split", "test-partition", "partitioner-arguments"),
        "rounds-per-stage",
        *("head-epochs-order", "learning-rate-schedule", "finetune-part", "mixing"),
        *("consensus-step", "compressor", "trigger", "spectrum", "initialization"),
    )
)
# Texts that are a built-in name or an import path.
MAY_BE_CODE = frozenset(("algorithm", "srpfl-base", "partition", "metrics"))
# The text of a custom class's setting that names no place, address or code.
WORDS = re.compile(r"[\w\s,;=+-]*")
# The largest integer, besides the seed, that is followed.
LARGEST = 10**6
# Values in place of what is not followed; elsewhere it is the setting's default. The
# empty names are those of nothing, so that none is used unless it was asked for.
INSTEAD: Settings = {"algorithm": "", "srpfl-base": "", "task": "", "partition": "iid"}
# Settings that a trained model is used without: their replacements will do.
DISPENSABLE = frozenset(("partition", "metrics", "cache-dir"))
# Options of both commands; all other settings are named in --run-config.
FLAGS = ("task", "algorithm", "data-dir")


class Followed(NamedTuple):
    """The settings of a file that may be used.

    Parameters
    ----------
    settings : mapping
        The settings, without what is withheld.
    withheld : dict of str to setting
        Values that the file alone names, by setting.
    """

    settings: Settings
    withheld: Mapping[str, Any]

    def need(self, names: Iterable[str]) -> None:
        """Raise `SettingsError` if one of some settings is withheld and needed.

        The line says how to name it.
        """
        for name in sorted(self.withheld.keys() & {*names} - DISPENSABLE):
            value = self.withheld[name]
            code = name in ("task", *MAY_BE_CODE) and is_path(value)
            used = "whose code is run" if code else "which is used"
            option, python = f"--run-config '{name}=...'", f"named={{{name!r}: ...}}"
            if name in FLAGS:
                option, python = f"--{name}", f"{name.replace('-', '_')}=..."
            raise SettingsError(
                f"its {name} is {value!r}, {used} only where you name it, too: by "
                f"{option}, or {python} in Python"
            )

    def need_task(self, without: Iterable[str] = ()) -> None:
        """Raise as `need` if the task, or a setting that it declares, is withheld.

        ``without`` are settings that are not needed.
        """
        self.need(["task"])
        task = str(self.settings["task"])
        # Those that are generated declare a data-dir and read none.
        unread = {"data-dir"} if task in GENERATED else set[str]()
        known = {*declared(task_maker(task)), "num-clients"}
        self.need(known - unread - {*without})


def followed(settings: Mapping[str, Any], named: Settings) -> Followed:
    """Return what may be used of a file's settings.

    Numbers, and texts that only choose among what is built in, are followed. All that
    could have an effect outside of the process (an import path, a place, an address, a
    task that downloads its data) and integers above `LARGEST` must be named by the
    user as well.

    Parameters
    ----------
    settings : mapping
        The file's.
    named : mapping
        The user's, by the settings' names. Code must be that of the file; any other
        value takes the place of the file's.

    Raises
    ------
    SettingsError
        If the user names unknown settings, or other code than the file.
    """
    for name, value in named.items():
        if name not in settings and name not in defaults():
            raise unknown("setting", name, {*settings, *defaults()})
        if name == "task" or name in MAY_BE_CODE:
            own = settings.get(name, defaults().get(name))
            require(value == own, name, value, f"that of the file, {own!r}")
    withheld = {
        name: value
        for name, value in settings.items()
        if name not in named and _reaches_out(name, value, settings, named)
    }
    kept = {n: v for n, v in settings.items() if n not in withheld}
    instead = {n: v for n, v in INSTEAD.items() if n in withheld}
    return Followed({**kept, **instead, **named}, withheld)


def named_settings(others: Settings | None, **texts: str) -> dict[str, Setting]:
    """Return the settings that a user names; an empty text names none.

    ``texts``, with ``_`` for ``-`` in their names, take precedence over ``others``.
    """
    given = {name.replace("_", "-"): text for name, text in texts.items() if text}
    return {**(others or {}), **given}


def _reaches_out(name: str, value: Any, settings: Settings, named: Settings) -> bool:
    """Return whether following a setting could have an effect outside."""
    if not isinstance(value, str):
        is_large = type(value) is int and abs(value) > LARGEST and name != "seed"
        return is_large or not isinstance(value, bool | int | float)
    if value == defaults().get(name):
        return False
    if name == "task":
        # A folder that the user names stands in for a data set of the hub.
        if value.startswith("hf:"):
            return not named.get("data-dir")
        return is_path(value) or (
            value in TASKS and value not in (*GENERATED, *IN_FOLDERS)
        )
    if name in MAY_BE_CODE:
        return is_path(value)
    if name in defaults():
        # A text where there must be a number is refused as such.
        return isinstance(defaults()[name], str) and name not in PLAIN
    return WORDS.fullmatch(value) is None
