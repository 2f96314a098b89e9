"""FedAvg in Flower, without flwr-frl."""
