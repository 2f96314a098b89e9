"""Ablation: why fine-tuned FedAvg is as accurate as methods with personal heads.

FedAvg-FT differs from FedRep, FedPer and FLUTE in two ways. Its head is fine-tuned on
the final representation, just before the test, while theirs are as old as the client's
last sampled round; and its representation was trained below one common head. The
clients of ``configs/fedavg_ft.toml`` are tested with several heads, so that both
factors can be changed separately.
"""

from typing import Any

import numpy as np
from flwr.common import NDArrays, Scalar

from flwr_frl.clients.base import Config, EvaluateResult, FitResult
from flwr_frl.clients.device.groups import HEAD, Groups, Tensors, under, within
from flwr_frl.clients.fedavg import FedAvgClient
from flwr_frl.clients.fedper import FedPerClient
from flwr_frl.clients.fedrep import FedRepClient
from flwr_frl.clients.flute import FLUTEClient
from flwr_frl.clients.lg_fedavg import LGFedAvgClient
from flwr_frl.common.messages import SERVER_ROUND
from flwr_frl.results.results import METRICS, read_rows
from flwr_frl.strategies.averaging import FedAvg, FedPer, LGFedAvg
from flwr_frl.strategies.fedrep import FedRep
from flwr_frl.strategies.flute import FLUTE

# Metrics of the heads, and the number of rounds since a client was sampled
FRESH, INITIAL, AGE = "accuracy-fresh", "accuracy-initial", "head-age"
OLD, OLD_TRAINED = "accuracy-old-received", "accuracy-old-trained"
HEADS = ("accuracy", FRESH, INITIAL, OLD, OLD_TRAINED, AGE)
# Epochs of a head before a test, equal to the default of `finetune-epochs`.
EPOCHS = 10
# Groups of FedAvg's old heads, which are not part of the model.
RECEIVED, TRAINED = "old-received.", "old-trained."


class FreshHeads:
    """Mixin for clients that are also tested with heads trained before the test.

    ``accuracy-fresh`` starts from the head that the method tests, ``accuracy-initial``
    from that of the initial model; both have `EPOCHS`. Nothing is saved.
    """

    def evaluate(self, parameters: NDArrays, config: Config) -> EvaluateResult:
        """Test as the method does, then with both heads."""
        loss, count, metrics = super().evaluate(parameters, config)
        self.train("head", EPOCHS)
        metrics[FRESH] = self.accuracy()
        self.model.head.load_state_dict(under(HEAD, self.task.initial_state))
        self.train("head", EPOCHS)
        metrics[INITIAL] = self.accuracy()
        return loss, count, metrics

    def accuracy(self) -> Scalar:
        """Return the accuracy of the current model on the test examples."""
        return self._test(self.model)[2]["accuracy"]


class FedAvgHeadsClient(FreshHeads, FedAvgClient):
    """FedAvg's client that also keeps the fine-tuned heads of its last sampled round.

    One is fine-tuned on the received model, as FedRep's, and one on the model after
    local training, as FedPer's. The reply is FedAvg's.
    """

    personal: Groups = (RECEIVED, TRAINED)

    def initial_group(self, group: str) -> Tensors:
        """Return the received head, as a client that was never sampled has no other."""
        return under(HEAD, self.received or self.task.initial_state)

    def fit(self, parameters: NDArrays, config: Config) -> FitResult:
        """Reply as FedAvg, then fine-tune and save both heads."""
        reply = super().fit(parameters, config)
        self._keep_head(TRAINED)
        self.model.load(self.received)
        self._keep_head(RECEIVED)
        self._save()
        return reply

    def _keep_head(self, group: str) -> None:
        self.train("head", EPOCHS)
        head = self.model.head.state_dict()
        self.saved |= within(group, {name: t.clone() for name, t in head.items()})

    def evaluate(self, parameters: NDArrays, config: Config) -> EvaluateResult:
        """Test the received representation with each head, and add the heads' age."""
        loss, count, metrics = super().evaluate(parameters, config)
        for group, name in ((RECEIVED, OLD), (TRAINED, OLD_TRAINED)):
            self.model.head.load_state_dict(under(group, self.saved))
            metrics[name] = self.accuracy()
        if self._state.round:
            metrics[AGE] = int(config[SERVER_ROUND]) - self._state.round
        return loss, count, metrics


class FedPerHeadsClient(FreshHeads, FedPerClient):
    """FedPer's client, tested with its own old head and fresh ones."""


class FedRepHeadsClient(FreshHeads, FedRepClient):
    """FedRep's client, tested with its own old head and fresh ones."""


class FLUTEHeadsClient(FreshHeads, FLUTEClient):
    """FLUTE's client, tested with the server's head for it and fresh ones."""


class LGFedAvgHeadsClient(FreshHeads, LGFedAvgClient):
    """LG-FedAvg's client, tested with the shared head and fresh ones."""


class FedAvgHeads(FedAvg, client="benchmarks.fedavg_ft:FedAvgHeadsClient"):
    """FedAvg, tested with several heads."""


class FedPerHeads(FedPer, client="benchmarks.fedavg_ft:FedPerHeadsClient"):
    """FedPer, tested with several heads."""


class FedRepHeads(FedRep, client="benchmarks.fedavg_ft:FedRepHeadsClient"):
    """FedRep, tested with several heads."""


class FLUTEHeads(FLUTE, client="benchmarks.fedavg_ft:FLUTEHeadsClient"):
    """FLUTE, tested with several heads."""


class LGFedAvgHeads(LGFedAvg, client="benchmarks.fedavg_ft:LGFedAvgHeadsClient"):
    """LG-FedAvg, tested with several heads."""


def means(job: Any, result: Any) -> dict[str, Any]:
    """Return the means of each accuracy and of the heads' age over the rounds."""
    tested = [row for row in read_rows(job.run_folder / METRICS) if FRESH in row]
    return {
        name: float(np.mean([row[name] for row in tested]))
        for name in HEADS
        if name in tested[0]
    }
