"""Caches that live for one run."""

import pytest

from flwr_frl.common.run_cache import begin_run, run_cache, run_object


@pytest.fixture(autouse=True)
def run():
    begin_run()
    yield
    begin_run()


def test_results_and_objects_live_until_the_next_run():
    calls = []

    @run_cache(maxsize=1)
    def double(number: int) -> int:
        """Double a number."""
        calls.append(number)
        return 2 * number

    assert [double(1), double(1), double(2), double(1)] == [2, 2, 4, 2]
    assert calls == [1, 2, 1]
    assert double.__doc__ == "Double a number."
    first = run_object(dict)
    assert run_object(dict) is first
    begin_run()
    assert double(1) == 2
    assert calls == [1, 2, 1, 1]
    assert run_object(dict) is not first
