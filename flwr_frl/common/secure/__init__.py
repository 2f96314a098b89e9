"""Secure aggregation: cryptography and fixed point, without Flower and torch."""
