"""How a Ray grid splits the messages of a round over its workers."""

from hypothesis import given
from hypothesis import strategies as st

from flwr_frl.strategies.grids.simulation import split


def by_worker(lengths: list[int], workers: int) -> list[int]:
    """Return the number of messages per worker if all messages take the same time."""
    loads = [0] * workers
    for length in lengths:
        loads[loads.index(min(loads))] += length
    return loads


@given(st.integers(0, 300), st.integers(1, 20), st.sampled_from([1, 4, 32]))
def test_chunks_preserve_the_order_and_balance_the_workers(number, workers, together):
    chunks = split(list(range(number)), workers, together)
    assert [m for chunk in chunks for m in chunk] == list(range(number))
    loads = by_worker([len(chunk) for chunk in chunks], workers)
    assert max(loads) == -(-number // workers)
    assert max(map(len, chunks), default=0) <= max(together, -(-number // workers))


def test_hundred_clients_are_split_evenly_over_two_workers():
    # Chunks of 32, the cohort size, would give one worker 64 clients and the other 36.
    assert [len(c) for c in split(range(100), 2, 32)] == [25, 25, 25, 25]
    assert [len(c) for c in split(range(100), 2, 1)] == [13] * 4 + [12] * 4
    assert [len(c) for c in split(range(64), 2, 32)] == [32, 32]
    assert [len(c) for c in split(range(5), 2, 32)] == [3, 2]
    assert [len(c) for c in split(range(3), 8, 1)] == [1, 1, 1]
