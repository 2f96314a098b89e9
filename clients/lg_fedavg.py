"""LG-FedAvg (Liang et al., 2020): a shared head on personal representations."""

from flwr.common import NDArrays, Scalar

from clients.base import Client, Reply


class LGFedAvgClient(Client):
    """Train both parts together; the representation stays here.

    The head is the last two layers, unless ``head-layers`` says otherwise.
    """

    shared = ("head.",)
    personal = ("representation.",)
    head_layers = 2

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> Reply:
        """Train both parts for ``representation-epochs``.

        Parameters
        ----------
        parameters : list of ndarray
            The shared head.
        config : dict
            ``server-round``.

        Returns
        -------
        tuple
            As `Client.send`; the head only.
        """
        self.receive(parameters)
        loss = self.train("all", int(self.settings["representation-epochs"]))
        self.keep(config)
        return self.send(loss)
