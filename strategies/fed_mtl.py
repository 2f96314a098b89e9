"""Fed-MTL: mean-regularised multi-task learning (Smith et al., NeurIPS 2017)."""

from flwr_frl.strategies.server.client_state_mean import AllClientsMean


class FedMTL(AllClientsMean, client="flwr_frl.clients.fed_mtl:FedMTLClient"):
    """Mean-regularised multi-task learning, as in the comparison of FedRep's paper.

    min Σ_i f_i(w_i) + λ tr(W Ω Wᵀ) + λ₂ ‖W‖² with Ω = (I − 11ᵀ/m)² fixed, in which all
    tasks are equally related, by SGD on each w_i in turn. In their code W has the
    models of a round's m sampled clients. Here it has the models of all clients that
    have trained, and the server keeps their mean w̄ only. MOCHA's original form, which
    learns Ω and solves convex duals, does not apply to deep models.
    """
