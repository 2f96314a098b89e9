"""``NAME-ft``: fine-tuned variants of global methods (FedRep, section 5.2)."""

from functools import cache
from typing import TypeVar, cast

from flwr_frl.clients.base import Client, deployed_groups, on_copy
from flwr_frl.clients.device.parameter_groups import WHOLE
from flwr_frl.common.settings import SettingsError, setting
from flwr_frl.task.models import Part, SplitModel

C = TypeVar("C", bound=Client)


class FineTuned(Client):
    """Deploy the global model with a part fine-tuned on the client's data.

    Parameters
    ----------
    finetune_epochs : int, default 10
        Epochs of the head before the final test (FedRep, section 5.2).
    """

    finetune_epochs: int = setting(10, ge=0)

    @property
    def finetuned_part(self) -> Part:
        """The part that is fine-tuned."""
        return "head"

    def deployed_model(self) -> SplitModel:
        """Fine-tune the head, or another part, for ``finetune-epochs``.

        Without training examples, return the global model.
        """
        if not len(self.task.train_examples(self._index)):
            return self.model
        with on_copy(self) as client:
            client.train(self.finetuned_part, self.settings.finetune_epochs)
        return client.model


@cache
def fine_tuned(kind: type[C]) -> type[C]:
    """Return the fine-tuned variant of a global method's client.

    Parameters
    ----------
    kind : type of Client
        A client that deploys the shared model unchanged.

    Returns
    -------
    type of Client
        A subclass of `kind` and of `FineTuned`, cached.

    Raises
    ------
    SettingsError
        If the method is not global.
    """
    # If it is a property, the groups depend on the client.
    shares_all = isinstance(kind.shared, tuple) and {*WHOLE} <= {*kind.shared}
    plain = all(
        getattr(kind, name) is getattr(Client, name)
        for name in ("evaluate", "deployed_model")
    )
    if not (shares_all and plain) or deployed_groups(kind):
        raise SettingsError(
            f"{kind.__name__} cannot be fine-tuned with '-ft'; it must use the whole "
            "shared model unchanged, as FedAvg's client does"
        )
    about: dict[str, object] = {
        "__doc__": FineTuned.__doc__,
        "__module__": kind.__module__,
        "_traits": kind._traits,
    }
    name, bases = f"{kind.__name__}-ft", (FineTuned, kind)
    # The variant inherits `update` from `kind`, so this trait must be that of `kind`.
    private = kind._traits.supports_example_dp
    return cast(type[C], type(name, bases, about, supports_example_dp=private))
