"""The apps as they are, without the repository's other files: these are too large."""

from flwr_frl.clients.client_app import make_app
from flwr_frl.strategies import server_app

server = server_app.make_app()
client = make_app()
