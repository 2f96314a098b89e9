"""Nodes of a graph: what they keep and exchange."""
