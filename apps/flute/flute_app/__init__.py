"""FLUTE as a Flower app."""
