"""Fixtures shared by the tests of `flwr_frl.task`."""

from collections.abc import Callable

import pytest

from flwr_frl.task.settings import SettingsError


@pytest.fixture
def code_of() -> Callable[[Callable[[], object]], str]:
    """Return a function that returns the code of a call's one-line `SettingsError`."""

    def code(call: Callable[[], object]) -> str:
        with pytest.raises(SettingsError) as error:
            call()
        assert "\n" not in str(error.value)
        return error.value.code

    return code
