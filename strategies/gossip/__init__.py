"""Strategies that relay messages over a graph."""
