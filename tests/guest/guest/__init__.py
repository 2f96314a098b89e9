"""A third-party package with an algorithm and a task that flwr-frl does not know."""
