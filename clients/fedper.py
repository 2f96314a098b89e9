"""FedPer (Arivazhagan et al., 2019): representation and head train together."""

from flwr.common import NDArrays, Scalar

from clients.base import Client, Reply


class FedPerClient(Client):
    """Train representation and head together; the head stays here."""

    shared = ("representation.",)
    personal = ("head.",)

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> Reply:
        """Train both parts for ``representation-epochs``.

        Parameters
        ----------
        parameters : list of ndarray
            The shared representation.
        config : dict
            ``server-round``.

        Returns
        -------
        tuple
            As `Client.send`; the representation only.
        """
        self.receive(parameters)
        loss = self.train("all", int(self.settings["representation-epochs"]))
        self.keep(config)
        return self.send(loss)
