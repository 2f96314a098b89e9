"""A driver for each library, which ``peers.py`` runs in separate processes."""
