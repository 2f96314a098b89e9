"""SRPFL as a Flower app."""
