"""Fine-tuned variants of global methods (FedRep, section 5.2): ``NAME-ft``."""

from dataclasses import dataclass
from functools import cache
from typing import Annotated, TypeVar, cast

from flwr_frl.clients.base import Client, TrainingSettings
from flwr_frl.clients.device.parameter_groups import WHOLE
from flwr_frl.task.models import SplitModel
from flwr_frl.task.settings import Range, SettingsError

C = TypeVar("C", bound=Client)


@dataclass(frozen=True)
class FineTuningSettings(TrainingSettings):
    """Settings of the fine-tuning, besides those of the method.

    Parameters
    ----------
    finetune_epochs : int, default 10
        Epochs of the head before the final test (FedRep, section 5.2).
    """

    finetune_epochs: Annotated[int, Range("[0, inf)")] = 10


class FineTuned(Client):
    """Use the global model with a head fine-tuned on the own data."""

    # The fine-tuned model, and the global one.
    also_test_global = True
    settings: FineTuningSettings

    def deployed_model(self) -> SplitModel:
        """Fine-tune the head of the global model for ``finetune-epochs``.

        Without training examples it is the global model.
        """
        if self.has_train_examples:
            self.train("head", self.settings.finetune_epochs)
        return self.model


@cache
def fine_tuned(kind: type[C]) -> type[C]:
    """Return a global method's client that trains as it does and then fine-tunes.

    Parameters
    ----------
    kind : type of Client
        A client that uses the shared model as it is.

    Returns
    -------
    type of Client
        A subclass of it and of `FineTuned`; always the same.

    Raises
    ------
    SettingsError
        If the method is not global.
    """
    whole = {*WHOLE} <= {*kind.shared}
    plain = all(
        getattr(kind, name) is getattr(Client, name)
        for name in ("evaluate", "deployed_model", "also_test_global")
    )
    if not (whole and plain):
        raise SettingsError(
            f"{kind.__name__} cannot be fine-tuned with '-ft'; it must use the whole "
            "shared model as it is, as FedAvg's client does"
        )
    if kind.personal and kind.predicts_with_personal:
        slots = ", ".join(map(repr, kind.personal))
        raise SettingsError(
            f"{kind.__name__} cannot be fine-tuned with '-ft'; its personal {slots} "
            "may be a part of the model that it uses: predicts_with_personal = False "
            "says that it is none"
        )
    bases = FineTuningSettings, kind.settings_type
    settings = type(f"{bases[1].__name__}-ft", bases, {"__module__": kind.__module__})
    about: dict[str, object] = {
        "__doc__": FineTuned.__doc__,
        "__module__": kind.__module__,
        "settings_type": dataclass(frozen=True)(settings),
    }
    return cast(type[C], type(f"{kind.__name__}-ft", (FineTuned, kind), about))
