"""Fed-MTL compared with a NumPy implementation of server and clients."""

import numpy as np
import pytest
from paper_rounds import VARIANTS, assert_losses, assert_rounds, run_variant
from softmax_runs import N, start


def numpy_fed_mtl(found, pull):
    """Return (w̄, columns of W) by round; None for a client that has not trained.

    The gradient of λ tr(W Ω Wᵀ) is 2λ W Ω with Ω = (I − 11ᵀ/m)². W is that of the start
    of the round, except for the column that moves.
    """
    mean, columns, rounds = start(), [None] * N, []
    for clients in found.trained:
        columns = [
            found.descend(mean if w is None else w, i, pull=2 * pull, anchor=mean)
            if i in clients
            else w
            for i, w in enumerate(columns)
        ]
        mean = np.mean([w for w in columns if w is not None], axis=0)
        rounds.append((mean, columns))
    return rounds


@pytest.mark.parametrize("variant", ["plain", "momentum", "srpfl"])
def test_every_round_matches_the_paper(variant):
    more = VARIANTS[variant]
    result = run_variant("fed-mtl", 5, mtl_lambda=0.4, evaluate={5}, **more)
    expected = numpy_fed_mtl(result, 0.4)
    assert_rounds(result, expected)
    mean, columns = expected[-1]
    assert_losses(result, [mean if w is None else w for w in columns])
    # The pull towards w̄ has an effect.
    alone = numpy_fed_mtl(result, 0.0)[-1][1]
    pairs = [(w, v) for w, v in zip(columns, alone, strict=True) if w is not None]
    assert max(np.abs(w - v).max() for w, v in pairs) > 1e-2
