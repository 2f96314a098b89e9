"""Clients for decentralised learning: nodes of a graph and their messages."""
