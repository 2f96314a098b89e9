"""Weights & Biases: its cloud, a server of one's own, or files alone."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import wandb

from flwr_frl.strategies.report.trackers.base import About, Tracker
from flwr_frl.task.checkpoint import FILE as CHECKPOINT
from flwr_frl.task.settings import SettingsError

PROJECT = "flwr-frl"
OFFLINE = "offline"


class WandB(Tracker):
    """A run of the project ``flwr-frl``; with the address ``offline`` files alone.

    They are in ``wandb`` in the results, for ``wandb sync``. Without an address it is
    ``WANDB_BASE_URL``, or the cloud; ``WANDB_MODE`` counts as ever.
    """

    def start(self, about: About) -> None:
        """Make a run with the settings as its config, or go on with it."""
        # Where nobody is logged in, it would ask at the terminal.
        offline = self.uri == OFFLINE
        online = not offline and os.environ.get("WANDB_MODE", "online") == "online"
        address = self.uri if online else ""
        if online and not wandb.login(host=address or None, prompt=False):
            raise SettingsError(
                "nobody is logged in; `wandb login` does it, and "
                f"tracker-uri={OFFLINE!r} needs nobody"
            )
        settings = wandb.Settings(silent=True, console="off")
        if address:
            settings.base_url = address
        self.run = wandb.init(
            project=PROJECT,
            id=about.run,
            name=about.algorithm,
            group=str(about.settings["experiment"]) or None,
            resume="allow",
            config={**about.settings, "checkpoint": str(about.directory / CHECKPOINT)},
            # A resumed run may have more rounds than it had.
            allow_val_change=True,
            dir=str(about.directory.parent),
            mode="offline" if offline else None,
            settings=settings,
        )
        self.run.define_metric("*", step_metric="round")

    def add(self, server_round: int, metrics: Mapping[str, float]) -> None:
        """Send a round's metrics."""
        self.run.log({**metrics, "round": server_round})

    def end(
        self, finished: bool, metrics: Mapping[str, float], files: Sequence[Path]
    ) -> None:
        """Send the result and the files."""
        self.run.summary.update({f"result/{n}": v for n, v in metrics.items()})
        for path in files:
            if path.suffix == ".png":
                self.run.log({path.name: wandb.Image(str(path))})
            else:
                with path.open(encoding="utf-8") as file:
                    self.run.log({path.name: wandb.Html(file)})
        self.run.finish(0 if finished else 1)
