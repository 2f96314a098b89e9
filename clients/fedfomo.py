"""FedFomo (Zhang et al., ICLR 2021): each client weighs the models that it receives."""

from math import isfinite

import torch

from flwr_frl.clients.base import Update
from flwr_frl.clients.device.groups import WHOLE, Tensors, under, within
from flwr_frl.clients.device.personal_model import PERSONAL_MODEL, PersonalModelClient
from flwr_frl.common.errors import SettingsError
from flwr_frl.common.messages import CANDIDATES, MODEL_WEIGHTS
from flwr_frl.common.settings import setting
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.held_out import EvaluationSettings, split
from flwr_frl.task.training.local_training import evaluate

BEFORE = "before."
WEIGHTS = MODEL_WEIGHTS.partition(".")[0] + "."
# Avoids a division by 0 for equal models.
SMALLEST_DISTANCE = 1e-5


class FedFomoClient(PersonalModelClient):
    """Algorithm 1, client side: θ_i ← θ_i + Σ_n w_n (θ_n − θ_i), then local training.

    The baseline θ_i^{t−1} is the model with which the last local training began. The
    candidates θ_n are the M received models and the client's own trained one. The
    weights are w_n = (L_i(θ_i^{t−1}) − L_i(θ_n)) / ‖θ_n − θ_i^{t−1}‖, the paper's
    first-order approximation, where L_i is the loss on the validation examples;
    negative weights become 0, and then all are divided by their sum. If none is
    positive, the client continues from its own trained model, as in PFLlib, rather than
    from the baseline. With no other model, this is local training.

    The authors' code differs from the paper, which is followed here: by default it
    divides by the 1-norm of θ_n − θ_i^{t−1}, and its candidates include means over
    clusters of clients. It tests the combined model of the round's clients, before
    local training; here, as in PFLlib, all clients are tested with their last trained
    models.

    The trained model and the baseline are personal. The trained model is also sent, and
    the server forwards it to other clients unchanged. For a client that joins later,
    the trained model and the baseline are the initial model; it weighs the received
    models and trains for ``newcomer-epochs``.

    Parameters
    ----------
    fomo_models : int, default 5
        Number M of other clients' models, as for the strategy.
    fomo_validation : float, default 0.2
        Share of the training examples on which models are weighed, and which a client
        does not train on (0.2 in the authors' commands and in PFLlib); with 0, models
        are weighed on all training examples.
    """

    shared = (CANDIDATES,)
    sent = (*WHOLE, WEIGHTS)
    personal = (PERSONAL_MODEL, BEFORE)
    fomo_models: int = setting(5, ge=0)
    fomo_validation: float = setting(0.2, ge=0, lt=1)

    def initial_group(self, group: str) -> Tensors:
        """Return no candidates, weights of 0, and initial personal models."""
        if group == CANDIDATES:
            initial = self.task.initial_state
            return {n: v.new_zeros((0, *v.shape)) for n, v in initial.items()}
        if group == WEIGHTS:
            return {"values": torch.zeros(self.settings.fomo_models)}
        return super().initial_group(group)

    def update(self) -> Update:
        """Combine the candidates, train, and send the model and the weights."""
        weights, loss = self.adapt(self.settings.representation_epochs)
        padded = torch.zeros(self.settings.fomo_models)
        padded[: len(weights)] = torch.tensor(weights)
        return loss, {**self.model.tensors, MODEL_WEIGHTS: padded}

    def personalize(self) -> None:
        """Weigh the received models, and train for ``newcomer-epochs``."""
        self.adapt(self.settings.newcomer_epochs)

    def adapt(self, epochs: int) -> tuple[list[float], float]:
        """Combine the candidates and train; return the others' weights and the loss."""
        weights = self.combine()
        before = {n: value.clone() for n, value in self.model.state_dict().items()}
        self.saved |= within(BEFORE, before)
        loss = self.train("all", epochs, examples=self.split()[0])
        self.keep_personal_model()
        return weights, loss

    def combine(self) -> list[float]:
        """Load the weighted mean of the candidates; return the others' weights.

        The returned weights are those before normalisation, which may be negative.
        """
        trained, before = under(PERSONAL_MODEL, self.saved), under(BEFORE, self.saved)
        received = under(CANDIDATES, self.received)
        count = len(next(iter(received.values())))
        others = [{n: v[i] for n, v in received.items()} for i in range(count)]
        weights = self._weights([*others, trained], before) if others else [1.0]
        positive = [max(w, 0.0) for w in weights]
        total = sum(positive)
        alone = [0.0] * len(others) + [1.0]
        shares = [w / total for w in positive] if total else alone
        self.model.load(_mean([*others, trained], shares))
        return weights[:-1]

    def _weights(self, models: list[Tensors], before: Tensors) -> list[float]:
        names = [name for name, _ in self.model.named_parameters()]
        baseline, weights = self._loss_of(before), []
        for model in models:
            gain = baseline - self._loss_of(model)
            squares = [(model[n] - before[n]).square().sum() for n in names]
            distance = float(torch.stack(squares).sum().sqrt())
            weight = gain / (distance + SMALLEST_DISTANCE)
            weights.append(weight if isfinite(weight) else 0.0)
        return weights

    def _loss_of(self, model: Tensors) -> float:
        self.model.load(model)
        loss, _ = evaluate(self.model, self.split()[1], self.task.loss)
        return loss

    def split(self) -> tuple[ExampleSet, ExampleSet]:
        """Return the examples to train on and the validation examples.

        The split is the same in every round. If a client has too few examples to split,
        both sets contain all of them.
        """
        examples, share = self.train_examples, self.settings.fomo_validation
        settings = EvaluationSettings(validation_fraction=share)
        try:
            return split(examples, self._index, settings, self.task.overlap)
        except SettingsError:
            return examples, examples.without_augmentation()


def _mean(models: list[Tensors], weights: list[float]) -> Tensors:
    """Return Σ_n w_n θ_n; integers, such as counters, are the last model's."""
    combined = dict(models[-1])
    for name, like in models[-1].items():
        if like.is_floating_point():
            pairs = zip(models, weights, strict=True)
            combined[name] = torch.stack([w * m[name] for m, w in pairs if w]).sum(0)
    return combined
