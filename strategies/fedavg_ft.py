"""FedAvg whose head every client fine-tunes in the end (FedRep, section 5.2)."""

from strategies.fedavg import FedAvg


class FedAvgFT(FedAvg):
    """Average the whole model; clients test it with a fine-tuned head."""

    client = "clients.fedavg_ft:FedAvgFTClient"
    evaluated_once = True
