"""pFedMe (T. Dinh et al., NeurIPS 2020): personal models by Moreau envelopes."""

import torch
from torch import Tensor

from flwr_frl.clients.base import Update
from flwr_frl.clients.device.personal_model import PersonalModelClient
from flwr_frl.common.settings import setting
from flwr_frl.task.examples import ExampleSet
from flwr_frl.task.training.sgd import Proximal, freeze, loop


class PFedMeClient(PersonalModelClient, assumes_sgd=True):
    """Algorithm 1, client side: w_i is sent, θ_i is personal.

    For each batch, θ makes K steps towards argmin f(θ) + λ/2 ‖θ − w‖², starting from
    the received w and then from the previous batch's θ; then w ← w − η λ (w − θ).
    Batch norm statistics are not parameters. Those of θ are sent, without η and β.
    ``learning-rate`` is the step size of θ. Each batch is one of the R local rounds, so
    ``representation-epochs`` determines R.

    In algorithm 1 all clients train in every round, and a sample of them sends w_i.
    Here only the sampled clients train; the others keep the θ_i of their last training.
    The authors' code also has a weight decay of 0.001 in the steps of θ.

    Parameters
    ----------
    pfedme_lambda : float, default 15
        λ of the objective f(θ) + λ/2 ‖θ − w‖² (equation 3; 15 in section 5.2).
    pfedme_steps : int, default 5
        K, steps of θ per batch (section 5.2).
    pfedme_eta : float, default 0.05
        η of w ← w − η λ (w − θ) (algorithm 1); 0.005 in section 5.2, for 800 rounds.
    pfedme_beta : float, default 1
        β of the server's w ← (1 − β) w + β mean w_i (algorithm 1).
    """

    pfedme_lambda: float = setting(15.0, gt=0)
    pfedme_steps: int = setting(5, ge=1)
    pfedme_eta: float = setting(0.05, gt=0)
    pfedme_beta: float = setting(1.0, gt=0)

    def update(self) -> Update:
        """Make a local round per batch; send w + β (w_i − w)."""
        settings, model = self.settings, self.model
        # The arrays contain a tied parameter under each of its names.
        theta = dict(model.named_parameters(remove_duplicate=False))
        start = {name: self.received[name] for name in theta}
        w = dict(start)

        def local_round(inputs: Tensor, targets: Tensor) -> Tensor:
            batch = ExampleSet(inputs, targets)
            near = Proximal(settings.pfedme_lambda, dict(w))
            value = self.train("all", settings.pfedme_steps, near, examples=batch)
            step = settings.pfedme_eta * settings.pfedme_lambda
            for name, value_of in theta.items():
                w[name] = w[name] + step * (value_of.detach() - w[name])
            return torch.tensor(value)

        # `loop` tests in training mode whether norms accept a batch of one example.
        freeze(model, "all")
        examples, epochs = self.train_examples, settings.representation_epochs
        loss = loop(local_round, examples, epochs, settings, model)
        self.keep_personal_model()
        beta = settings.pfedme_beta
        moved = {name: start[name] + beta * (w[name] - start[name]) for name in w}
        return loss, {**model.tensors, **moved}

    def personalize(self) -> None:
        """Train θ for ``newcomer-epochs`` (equation 3)."""
        self.personalize_near(self.settings.pfedme_lambda)
