"""What runs in processes of its own for ``peers.py``: a driver for each library."""
