"""Fine-tuned variants of global methods (FedRep, section 5.2)."""

from flwr_frl.clients.base import Client, on_copy
from flwr_frl.common.settings import setting
from flwr_frl.task.models import Part, SplitModel


class FineTuned(Client):
    """Deploy the global model with a part fine-tuned on the client's data.

    It is the first base of a variant, before the client of the global method:
    ``class MineFTClient(FineTuned, MineClient)``.

    Parameters
    ----------
    finetune_epochs : int, default 10
        Epochs of the head before the final test (FedRep, section 5.2).
    """

    finetune_epochs: int = setting(10, ge=0)

    def deployed_model(self) -> SplitModel:
        """Fine-tune the head, or the part of a setting ``finetune-part``.

        Without training examples, return the global model.
        """
        part: Part = getattr(self.settings, "finetune_part", "head")
        if not len(self.task.train_examples(self._index)):
            return self.model
        with on_copy(self) as client:
            client.train(part, self.settings.finetune_epochs)
        return client.model
