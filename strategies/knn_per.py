"""kNN-Per (Marfoq et al., ICML 2022): a global model with local nearest neighbours."""

from flwr_frl.strategies.fedavg import FedAvg


class KNNPer(FedAvg, client="flwr_frl.clients.knn_per:KNNPerClient"):
    """FedAvg whose clients mix its predictions with those of nearest neighbours.

    Training, messages and the server are FedAvg's (the first step of algorithm 1); only
    the model that clients deploy differs. The authors train the model first and mix
    once; here clients mix in every evaluation.
    """
