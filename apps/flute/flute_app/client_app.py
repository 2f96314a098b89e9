"""The client that belongs to the server's algorithm, on a device or in a simulation."""

from flwr_frl.clients.client_app import make_app

# For example `make_app(mods=[LocalDpMod(…)])`
app = make_app()
