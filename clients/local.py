"""Local training only: nothing is shared."""

from flwr.common import NDArrays, Scalar

from clients.base import Client, Reply


class LocalClient(Client):
    """Train the whole model on this client's data alone, round after round."""

    shared = ()
    personal = ("representation.", "head.")

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> Reply:
        """Go on with the own model for ``representation-epochs``.

        Parameters
        ----------
        parameters : list of ndarray
            Empty.
        config : dict
            ``server-round``.

        Returns
        -------
        tuple
            As `Client.send`; no arrays.
        """
        self.receive(parameters)
        loss = self.train("all", int(self.settings["representation-epochs"]))
        self.keep(config)
        return self.send(loss)
