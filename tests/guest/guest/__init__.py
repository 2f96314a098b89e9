"""Somebody else's package: an algorithm and a task that flwr-frl has never heard of."""
