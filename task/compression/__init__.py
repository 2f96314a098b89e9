"""Compression operators for messages between neighbours."""
