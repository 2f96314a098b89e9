"""Fed-MTL: mean-regularised multi-task learning (Smith et al., NeurIPS 2017)."""

from flwr_frl.strategies.server.all_clients_mean import AllClientsMean


class FedMTL(AllClientsMean):
    """Mean-regularised, as where FedRep's authors compare with it.

    min Σ_i f_i(w_i) + λ tr(W Ω Wᵀ) + λ₂ ‖W‖² with Ω = (I − 11ᵀ/m)² fixed, in which all
    tasks are equally related, by SGD on each w_i in turn. Their code takes W from LG-
    FedAvg's: the models of a round's m sampled clients. Here W has those of all that
    have trained, and the server keeps their mean w̄ alone. MOCHA's own form, which
    learns Ω and solves convex duals, is not for deep models.
    """

    client = "flwr_frl.clients.fed_mtl:FedMTLClient"
