"""Grids for simulation, and grids that close a round at the first replies."""
