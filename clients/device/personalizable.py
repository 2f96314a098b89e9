"""A client that comes after the training fits what is its own, and shares nothing."""

from typing import Any, ClassVar

from flwr.app import Context, RecordDict
from flwr.common import NDArrays, Scalar

from flwr_frl.clients.device.parameter_groups import (
    WHOLE,
    Groups,
    ParameterGroups,
    Tensors,
    to_numpy,
)
from flwr_frl.clients.device.state import PersonalState
from flwr_frl.task.held_out import fewer
from flwr_frl.task.messages import FITTED, SERVER_ROUND
from flwr_frl.task.models import SplitModel
from flwr_frl.task.settings import SettingsError
from flwr_frl.task.training import Regularizer

# Of slots that are parts of the model.
PARTS: dict[Groups, Any] = {
    WHOLE[:1]: "representation",
    WHOLE[1:]: "head",
    WHOLE: "all",
}


class Personalizable(ParameterGroups):
    """The part of a client that joins a federation whose training is over."""

    # Whether the deployed model has to do with the personal slots.
    predicts_with_personal: ClassVar[bool] = True
    # Slots that a newcomer fits; None for the personal ones.
    newcomer_groups: ClassVar[Groups | None] = None

    index: int
    settings: Any
    state: PersonalState
    received: Tensors
    attachments: dict[str, bytes]

    @classmethod
    def groups_to_fit(cls) -> Groups:
        """Return the slots that a newcomer fits, if it has anything of its own."""
        if cls.newcomer_groups is not None:
            return cls.newcomer_groups
        return cls.personal if cls.predicts_with_personal else ()

    def join(
        self, parameters: NDArrays, config: dict[str, Scalar], share: float, seed: int
    ) -> tuple[float, int, dict[str, Scalar]]:
        """Fit what is this client's own on a share of its examples, and test that.

        Parameters
        ----------
        parameters : list of ndarray
            The trained shared arrays.
        config : dict
            As for `receive`.
        share : float
            Of the training examples, drawn by ``seed``.

        Returns
        -------
        loss, num_examples, metrics
            As of `evaluate`; ``fitted`` is how many examples it was fitted on.
        """
        self.task = fewer(self.task, self.index, share, seed)
        self.receive(parameters, config)
        self.personalize()
        loss, num_examples, metrics = self.test(self.deployed_model())
        metrics[FITTED] = len(self.task.train_examples(self.index))
        return loss, num_examples, metrics

    def personalize(self) -> None:
        """Fit what is this client's own to the trained shared part, which stays.

        Called after `receive`. Here those slots of the model that are the client's own,
        or that it ``fits``, train for ``newcomer-epochs``, as FedRep's heads. Where it
        has slots beside the model, its `fit` is called so often, always with the
        trained shared part, and what it would send is thrown away. A client without
        anything of its own uses the global model.
        """
        if not self.groups_to_fit():
            return
        own = tuple(slot for slot in WHOLE if slot in self.groups_to_fit())
        parts = {*self.shared, *self.personal} <= {*WHOLE}
        if parts or (
            self.newcomer_groups is not None and {*self.newcomer_groups} <= {*WHOLE}
        ):
            self.train(PARTS[own], self.settings.newcomer_epochs)
            return
        parameters = [to_numpy(self.received[n]) for n in self.names(self.shared)]
        context = Context(0, 0, {}, RecordDict(), {})
        for server_round in range(1, self.settings.newcomer_epochs + 1):
            self.state = PersonalState(context)
            self.fit(parameters, {SERVER_ROUND: server_round})
        self.state, self.attachments = PersonalState(context), {}
        self.receive(parameters, {})

    def check_received(self, does: str) -> None:
        """Raise `SettingsError` if something is shared and nothing was received.

        The model is then what another client of this process has left; ``does`` is what
        the client would do with it.
        """
        if not self.received and self.names(self.shared):
            raise SettingsError(
                f"{type(self).__name__}.fit {does} what it has not received; it must "
                "call self.receive(parameters, config) first"
            )

    # Of `Client`.

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> Any:
        """As `NumPyClient.fit`."""
        raise SettingsError(
            f"{type(self).__name__} has no fit; it must define fit(self, parameters, "
            "config), what it does in a round"
        )

    def receive(self, parameters: NDArrays, config: dict[str, Scalar]) -> None:
        """As `Client.receive`."""
        raise NotImplementedError

    def train(
        self, part: Any, epochs: int, regularizer: Regularizer | None = None
    ) -> float:
        """As `Client.train`."""
        raise NotImplementedError

    def test(self, model: SplitModel) -> tuple[float, int, dict[str, Scalar]]:
        """As `Client.test`."""
        raise NotImplementedError

    def deployed_model(self) -> SplitModel:
        """As `Client.deployed_model`."""
        raise NotImplementedError
