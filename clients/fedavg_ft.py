"""FedAvg whose head every client fine-tunes in the end (FedRep, section 5.2)."""

from flwr.common import NDArrays, Scalar

from clients.base import Evaluation
from clients.fedavg import FedAvgClient


class FedAvgFTClient(FedAvgClient):
    """Train as in FedAvg; test with the head fine-tuned on the client's own data."""

    def evaluate(self, parameters: NDArrays, config: dict[str, Scalar]) -> Evaluation:
        """Test the global model, fine-tune its head, and test again.

        Parameters
        ----------
        parameters : list of ndarray
            The global model.
        config : dict
            Ignored.

        Returns
        -------
        tuple
            As `Client.evaluate` for the fine-tuned model; the metrics have
            ``accuracy-global`` as well, that of the global model.
        """
        self.receive(parameters)
        _, _, before = self.test()
        self.train("head", int(self.settings["finetune-epochs"]))
        loss, num_examples, metrics = self.test()
        if "accuracy" in before:
            metrics["accuracy-global"] = before["accuracy"]
        return loss, num_examples, metrics
