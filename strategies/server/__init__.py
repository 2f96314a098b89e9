"""The parts of a server that algorithms share: clients, replies, rounds, privacy."""
