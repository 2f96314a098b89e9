"""FedAvg (McMahan et al., AISTATS 2017)."""

from flwr.common import NDArrays, Scalar

from clients.base import Client, Reply


class FedAvgClient(Client):
    """Train the whole shared model; nothing is personal."""

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> Reply:
        """Train the global model for ``representation-epochs``.

        Parameters
        ----------
        parameters : list of ndarray
            The global model.
        config : dict
            ``server-round``.

        Returns
        -------
        tuple
            As `Client.send`.
        """
        self.receive(parameters)
        return self.send(self.train("all", int(self.settings["representation-epochs"])))
