"""Errors of invalid input, and packages that are not installed."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from flwr_frl.common.errors import SettingsError


def refusal(
    call: Callable[..., object], *arguments: object, **named: object
) -> SettingsError:
    """Return the error of one line that a call raises."""
    with pytest.raises(SettingsError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return caught.value


def code_of(call: Callable[..., object], *arguments: object, **named: object) -> str:
    """Return the code of the error of one line that a call raises."""
    return refusal(call, *arguments, **named).code


def assert_says(
    part: str, call: Callable[..., object], *arguments: object, **named: object
) -> None:
    """Check a part of the message, for errors that have the same code."""
    message = str(refusal(call, *arguments, **named))
    assert part in message, message


def uninstall(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Pretend that packages are not installed."""

    def find(name: str) -> object:
        return None if name in packages else find_spec(name)

    monkeypatch.setattr("flwr_frl.common.errors.find_spec", find)
    monkeypatch.setattr("flwr_frl.results.comparison.find_spec", find)
