"""The server: `FedRep`, chosen by ``algorithm`` in ``pyproject.toml``.

For a variant, subclass `flwr_frl.FedRep` in this package and set ``algorithm``
to its import path, such as ``"fedrep_app.variant:Mine"``.
"""

from flwr_frl.strategies.server_app import app

__all__ = ["app"]
