"""Server optimizers: FedAvgM, FedAdam, FedYogi and FedAdagrad.

The change Δ_t = mean_i x_i − x_t of a round replaces the negative gradient of an
optimizer, where the mean is that of the run's rule and weights. ``momentum`` is FedAvgM
(Hsu et al., 2019); the others are algorithm 2 of Reddi et al. (ICLR 2021).
"""

from typing import Any, Literal

import numpy as np

from flwr_frl.common.arrays import is_finite, is_parameter
from flwr_frl.strategies.server.replies import Arrays, rounded_to

OptimizerName = Literal["none", "momentum", "adam", "yogi", "adagrad"]
# Key of the moments m and v in the strategy's state.
MOMENTS = "server-optimizer"


def optimizer_step(
    settings: Any, state: dict[str, Any], sent: Arrays, mean: Arrays
) -> Arrays:
    """Return x_{t+1}, and save the moments unless it is not finite.

    With ``momentum``, m_t = β1 m_{t−1} + Δ_t and x_{t+1} = x_t + η m_t. Otherwise
    m_t = β1 m_{t−1} + (1 − β1) Δ_t and x_{t+1} = x_t + η m_t / (√v_t + τ), where v_t is

    - ``adagrad``: v_{t−1} + Δ_t²,
    - ``adam``: β2 v_{t−1} + (1 − β2) Δ_t²,
    - ``yogi``: v_{t−1} − (1 − β2) Δ_t² sign(v_{t−1} − Δ_t²).

    As in the paper, v starts at τ² and no bias is corrected. Flower starts v at 0, and
    corrects the bias in FedAdam.

    Integers and statistics are not parameters; they become the mean. The names of
    statistics are those of batch norms, of pFedFDA's Gaussians and MimeLite's momentum.

    Parameters
    ----------
    settings : StrategySettings
        The name of the optimizer, η, β1, β2 and τ.
    state : dict
        The strategy's state.
    sent : dict of str to ndarray
        x_t, from which Δ_t is measured.
    mean : dict of str to ndarray
        The mean of the replies.
    """
    kind, tau = settings.server_optimizer, settings.server_optimizer_tau
    rate = settings.server_optimizer_rate or (1.0 if kind == "momentum" else 0.03)
    beta1, beta2 = settings.server_optimizer_beta1, settings.server_optimizer_beta2
    former: dict[str, Arrays] = state.get(MOMENTS, {"m": {}, "v": {}})
    new, moments = dict(mean), {"m": Arrays(), "v": Arrays()}
    for name, value in mean.items():
        if not is_parameter(name, value):
            continue
        change = np.subtract(value, sent[name], dtype=np.float64)
        m = np.asarray(former["m"].get(name, 0.0), np.float64)
        m = beta1 * m + (change if kind == "momentum" else (1 - beta1) * change)
        step, precision = m, np.promote_types(value.dtype, np.float32)
        if kind != "momentum":
            v = np.asarray(former["v"].get(name, tau**2), np.float64)
            square = np.square(change)
            if kind == "adagrad":
                v = v + square
            elif kind == "adam":
                v = beta2 * v + (1 - beta2) * square
            else:
                v = v - (1 - beta2) * square * np.sign(v - square)
            step = m / (np.sqrt(v) + tau)
            moments["v"][name] = rounded_to(precision, v)
        moments["m"][name] = rounded_to(precision, m)
        new[name] = rounded_to(value.dtype, sent[name] + rate * step)
    if all(is_finite(*each.values()) for each in (new, *moments.values())):
        state[MOMENTS] = moments
    return new
