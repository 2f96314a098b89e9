"""SRPFL's stages: how many replies a round waits for (Tziotis et al., section 4)."""

import math
from collections.abc import Sequence

from flwr_frl.strategies.grids.speeds import Times
from flwr_frl.task.settings import SettingsError, require


def nodes_of(
    server_round: int, sampled: int, initial_nodes: int, lengths: Sequence[int]
) -> int:
    """Return min(N, 2^r n0), how many replies a round (from 1) waits for.

    N clients are sampled, and r is the round's stage: the stages have these lengths,
    and those that follow have the last one's.
    """
    count, begins, stage = initial_nodes, 1, 0
    while count < sampled:
        begins += lengths[min(stage, len(lengths) - 1)]
        if server_round < begins:
            return count
        count, stage = 2 * count, stage + 1
    return sampled


def automatic_stages(initial_nodes: int, sampled: int, rounds: int) -> list[int]:
    """Return the lengths of all stages but the last, with all N sampled clients.

    They share the first half of the rounds, rounded down; what is left over goes to
    the first ones. With fewer rounds than stages there the later ones are left out.
    """
    stages = 0
    while initial_nodes * 2**stages < sampled:
        stages += 1
    each, left = divmod(rounds // 2, stages) if stages else (0, 0)
    return [each + (stage < left) for stage in range(stages)]


def listed_stages(lengths: int | str | Sequence[int]) -> tuple[int, ...]:
    """Return the stages' lengths: a number, several, or a text of them with commas.

    Raises `SettingsError` for none, and for one that is no number of at least 1.
    """
    if isinstance(lengths, str):
        parts = [part.strip() for part in lengths.split(",") if part.strip()]
        if not parts or not all(part.isdecimal() and int(part) >= 1 for part in parts):
            raise SettingsError(
                f"rounds-per-stage is {lengths!r}; it must be a number of rounds, "
                "several with commas between them, each at least 1, 'theory' or 'auto'"
            )
        return tuple(map(int, parts))
    found = (lengths,) if isinstance(lengths, int) else tuple(lengths)
    valid = bool(found) and min(found) >= 1
    allowed = "a list of at least one number, each at least 1"
    require(valid, "rounds-per-stage", lengths, allowed)
    return found


def theory_stages(
    initial_nodes: int, expected_arrivals: Times, contraction: float
) -> list[int]:
    """Return the lengths of all stages but the last by the theory.

    τ_r is 2 log(2 (E[T_(2n)] − E[T_(n)]) / (E[T_(n)] − E[T_(n/2)])) / log(1/(1 − a)),
    rounded up and at least 1 (SRPFL, section 4), for n = 2^r n0 and the contraction a.
    ``expected_arrivals`` are E[T_(n)] for n = 1 … N.
    """
    total = len(expected_arrivals)

    def arrival(n: int) -> float:
        return float(expected_arrivals[min(n, total) - 1]) if n else 0.0

    lengths, n = [], initial_nodes
    while n < total:
        later, earlier = arrival(2 * n) - arrival(n), arrival(n) - arrival(n // 2)
        ratio = 2 * later / earlier if earlier > 0 else 1.0
        rounds = 2 * math.log(max(ratio, 1.0)) / -math.log(1 - contraction)
        lengths.append(max(1, math.ceil(rounds)))
        n *= 2
    return lengths or [1]
