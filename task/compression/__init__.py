"""Compression operators: what a message is."""
