"""Strategies for decentralised learning: the server relays messages over a graph."""
