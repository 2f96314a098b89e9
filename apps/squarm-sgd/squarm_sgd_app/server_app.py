"""The server: `SQuARMSGD`, chosen by ``algorithm`` in ``pyproject.toml``.

For a variant, subclass `flwr_frl.SQuARMSGD` in this package and set ``algorithm``
to its import path, such as ``"squarm_sgd_app.variant:Mine"``.
"""

from flwr_frl.strategies.server_app import app

__all__ = ["app"]
