"""The server: `FLUTE`, chosen by ``algorithm`` in ``pyproject.toml``.

For a variant, subclass `flwr_frl.FLUTE` in this package and set ``algorithm``
to its import path, such as ``"flute_app.variant:Mine"``.
"""

from flwr_frl.strategies.server_app import app

__all__ = ["app"]
