"""FedAvg in Flower, with nothing of flwr-frl."""
