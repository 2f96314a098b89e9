"""How a Ray grid splits the messages of a round over its workers."""

from hypothesis import given
from hypothesis import strategies as st

from flwr_frl.strategies.grids.simulation import split


def by_worker(lengths: list[int], workers: int) -> list[int]:
    """Return how many each worker answers, if all take the same time."""
    loads = [0] * workers
    for length in lengths:
        loads[loads.index(min(loads))] += length
    return loads


@given(st.integers(0, 300), st.integers(1, 20), st.sampled_from([1, 4, 32]))
def test_chunks_are_all_messages_in_order_and_no_worker_waits_for_another(
    number, workers, together
):
    chunks = split(list(range(number)), workers, together)
    assert [m for chunk in chunks for m in chunk] == list(range(number))
    loads = by_worker([len(chunk) for chunk in chunks], workers)
    assert max(loads) == -(-number // workers)
    assert max(map(len, chunks), default=0) <= max(together, -(-number // workers))


def test_a_hundred_clients_are_halved_for_two_workers():
    # In chunks of 32, which is how many may train together, one has 64 and one 36.
    assert [len(c) for c in split(range(100), 2, 32)] == [25, 25, 25, 25]
    assert [len(c) for c in split(range(100), 2, 1)] == [13] * 4 + [12] * 4
    assert [len(c) for c in split(range(64), 2, 32)] == [32, 32]
    assert [len(c) for c in split(range(5), 2, 32)] == [3, 2]
    assert [len(c) for c in split(range(3), 8, 1)] == [1, 1, 1]
