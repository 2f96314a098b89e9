"""FedSA-LoRA as a Flower app."""
