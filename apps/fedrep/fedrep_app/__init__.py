"""FedRep as a Flower app."""
