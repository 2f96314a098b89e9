"""What a server needs besides an algorithm: clients, replies, rounds, results."""
