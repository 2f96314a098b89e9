"""Algorithms whose server only averages what clients send.

They differ in their clients, which have the same names.
"""

import numpy as np

from flwr_frl.common.messages import COINS, PROXIMAL_WEIGHT
from flwr_frl.common.settings import setting
from flwr_frl.strategies.base import Arrays, Round, Strategy
from flwr_frl.strategies.server.client_state_mean import AllClientsMean


# FedAvg (McMahan et al., AISTATS 2017)
class FedAvg(Strategy, client="flwr_frl.clients.fedavg:FedAvgClient"):
    """Average the whole model."""


class FedAvgFT(
    FedAvg,
    client="flwr_frl.clients.fedavg:FedAvgFTClient",
    # Each evaluation fine-tunes anew.
    evaluate_last_round_only=True,
):
    """FedAvg; clients test it with a fine-tuned head (FedRep, section 5.2)."""


# FedProx (Li et al., MLSys 2020)
class FedProx(Strategy, client="flwr_frl.clients.fedprox:FedProxClient"):
    """Average models that were trained with a proximal term.

    Parameters
    ----------
    proximal_mu : float, default 0.01
        μ of the proximal term μ/2 ‖w − wᵗ‖² (algorithm 2); 0 is FedAvg. Clients receive
        it with each training message, under the key of Flower's FedProx.
    **base
        Arguments of `Strategy`.
    """

    proximal_mu: float = setting(0.01, ge=0)

    def begin(self, round: Round) -> None:
        """Send μ."""
        round.config[PROXIMAL_WEIGHT] = self.proximal_mu


class FedProxFT(
    FedProx,
    client="flwr_frl.clients.fedprox:FedProxFTClient",
    evaluate_last_round_only=True,
):
    """FedProx; clients test it with a fine-tuned head."""


# FedPer (Arivazhagan et al., 2019)
class FedPer(Strategy, client="flwr_frl.clients.fedper:FedPerClient"):
    """Average the representations; heads stay with the clients."""


# LG-FedAvg (Liang et al., 2020)
class LGFedAvg(Strategy, client="flwr_frl.clients.lg_fedavg:LGFedAvgClient"):
    """Average the heads (last two layers); representations stay with the clients."""


# Local training only
class Local(Strategy, client="flwr_frl.clients.local:LocalClient", uses_mean="never"):
    """Let the sampled clients train without sharing; messages contain no arrays."""

    def aggregate(self, round: Round) -> Arrays | None:
        """Return no arrays."""
        return {}


# Ditto (Li et al., ICML 2021)
class Ditto(Strategy, client="flwr_frl.clients.ditto:DittoClient"):
    """Algorithm 1: average the global models; personal models stay with the clients."""


# APFL (Deng et al., 2020)
class APFL(Strategy, client="flwr_frl.clients.apfl:APFLClient"):
    """Algorithm 1: average the global models; personal models stay with the clients."""


# pFedMe (T. Dinh et al., NeurIPS 2020)
class PFedMe(Strategy, client="flwr_frl.clients.pfedme:PFedMeClient"):
    """Algorithm 1: average the w_i; personalised models θ_i stay with the clients.

    The server's step w ← (1 − β) w + β mean w_i is linear, so clients return
    (1 − β) w + β w_i, and the server averages these.
    """


# FedBABU (Oh et al., ICLR 2022)
class FedBABU(
    Strategy,
    client="flwr_frl.clients.fedbabu:FedBABUClient",
    # Each evaluation fine-tunes anew.
    evaluate_last_round_only=True,
):
    """Algorithm 1: average representations that were trained under the initial head."""


# FedBN (Li et al., ICLR 2021)
class FedBN(Strategy, client="flwr_frl.clients.fedbn:FedBNClient"):
    """Algorithm 1: average all but the batch norms, which stay with the clients."""


# FedALA (Zhang et al., AAAI 2023)
class FedALA(Strategy, client="flwr_frl.clients.fedala:FedALAClient"):
    """Algorithm 1: average the models; the mixing weights stay with the clients."""


# Per-FedAvg (Fallah et al., NeurIPS 2020)
class PerFedAvg(Strategy, client="flwr_frl.clients.per_fedavg:PerFedAvgClient"):
    """Algorithm 1: average the meta-models; clients adapt them with one more step."""


class HFMAML(Strategy, client="flwr_frl.clients.per_fedavg:HFMAMLClient"):
    """Per-FedAvg (HF): the clients' meta-gradients include the Hessian term."""


# L2GD (Hanzely & Richtárik, 2020)
class L2GD(AllClientsMean, client="flwr_frl.clients.l2gd:L2GDClient"):
    """Algorithm 1: share the mean x̄ of the local models, and draw the coins.

    All clients of a round have the same coins, which follow from the seed and the
    round.
    """

    def begin(self, round: Round) -> None:
        """Send the seed of the round's coins."""
        rng = np.random.default_rng([self.settings.seed, round.number, 0xC019])
        round.config[COINS] = int(rng.integers(10**8))


# Fed-MTL
class FedMTL(AllClientsMean, client="flwr_frl.clients.fed_mtl:FedMTLClient"):
    """Mean-regularised multi-task learning, as in the comparison of FedRep's paper.

    min Σ_i f_i(w_i) + λ tr(W Ω Wᵀ) + λ₂ ‖W‖² with Ω = (I − 11ᵀ/m)² fixed, in which all
    tasks are equally related, by SGD on each w_i in turn. In their code W has the
    models of a round's m sampled clients. Here it has the models of all clients that
    have trained, and the server keeps their mean w̄ only. MOCHA's original form, which
    learns Ω and solves convex duals, does not apply to deep models.
    """


# FedRoD (Chen & Chao, ICLR 2022)
class FedRoD(Strategy, client="flwr_frl.clients.fedrod:FedRoDClient"):
    """Average the generic models; personalised heads stay with the clients."""


# FedCP (Zhang et al., KDD 2023)
class FedCP(Strategy, client="flwr_frl.clients.fedcp:FedCPClient"):
    """Average representations, policies, and means of personal and shared heads.

    The server knows the shared head, so it could derive a client's personal head.
    """


# FML (Shen et al., 2020)
class FML(Strategy, client="flwr_frl.clients.fml:FMLClient"):
    """Average the meme models; the private models may differ in architecture."""


# FedMRL (Yi et al., NeurIPS 2024)
class FedMRL(Strategy, client="flwr_frl.clients.fedmrl:FedMRLClient"):
    """Algorithm 1: average the small models; the other parts stay with the clients."""


# MOON (Li et al., CVPR 2021)
class MOON(Strategy, client="flwr_frl.clients.moon:MOONClient"):
    """Algorithm 1: average the models; clients add the contrastive loss."""


# MimeLite (Karimireddy et al., NeurIPS 2021)
class MimeLite(Strategy, client="flwr_frl.clients.mime:MimeLiteClient"):
    """Algorithm 1: average the models, and the clients' values of the new momentum."""


# FedLC (Zhang et al., ICML 2022)
class FedLC(Strategy, client="flwr_frl.clients.fedlc:FedLCClient"):
    """Average the models; clients train calibrated logits."""


# FedNTD (Lee et al., NeurIPS 2022)
class FedNTD(Strategy, client="flwr_frl.clients.fedntd:FedNTDClient"):
    """Average the models; clients distil the received one's not-true classes."""


# FedPHP (Li et al., ECML PKDD 2021)
class FedPHP(Strategy, client="flwr_frl.clients.fedphp:FedPHPClient"):
    """Average the local models; private models stay with the clients."""


# FedEM (Marfoq et al., NeurIPS 2021)
class FedEM(Strategy, client="flwr_frl.clients.fedem:FedEMClient"):
    """Algorithm 1: average each component; the weights π stay with the clients.

    The paper uses ``weighting="examples"``.
    """


# GPFL (Zhang et al., ICCV 2023)
class GPFL(Strategy, client="flwr_frl.clients.gpfl:GPFLClient"):
    """Average representations, category embeddings and valves; heads stay personal."""


# pFedFDA (McLaughlin & Su, NeurIPS 2024)
class PFedFDA(Strategy, client="flwr_frl.clients.pfedfda:PFedFDAClient"):
    """Algorithm 1: average representations, class means and covariances.

    Clients send the adapted means and covariance, so every average covers only the
    clients of a round. The paper uses ``weighting="examples"``.
    """


# kNN-Per (Marfoq et al., ICML 2022)
class KNNPer(FedAvg, client="flwr_frl.clients.knn_per:KNNPerClient"):
    """FedAvg whose clients mix its predictions with those of nearest neighbours.

    Training, messages and the server are FedAvg's (the first step of algorithm 1); only
    the model that clients deploy differs. The authors train the model first and mix
    once; here clients mix in every evaluation.
    """


# FedSA-LoRA (Guo et al., ICLR 2025)
class FedSALoRA(Strategy, client="flwr_frl.clients.fedsa_lora:FedSALoRAClient"):
    """Average the matrices A; the matrices B and the heads stay with the clients."""


# FFA-LoRA (Sun et al., ICLR 2024)
class FFALoRA(
    Strategy, client="flwr_frl.clients.ffa_lora:FFALoRAClient", uses_mean="only"
):
    """Average the matrices B and the heads; the matrices A never change."""

    def aggregate(self, round: Round) -> Arrays:
        """Return the mean, with the old A of clients of another app that train it."""
        frozen = {n: a for n, a in round.arrays.items() if "lora_A" in n}
        return {**round.mean(), **frozen}


# FedDPA (Yang et al., NeurIPS 2024)
class FedDPA(Strategy, client="flwr_frl.clients.feddpa:FedDPAClient"):
    """Average the global adapters and heads; personal ones stay with the clients."""
