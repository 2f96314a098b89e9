"""TensorBoard, by tensorboardX: event files in a folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from tensorboardX import SummaryWriter
from tensorboardX.summary import hparams

from flwr_frl.strategies.report.results import QUALITY
from flwr_frl.strategies.report.trackers.base import About, Tracker
from flwr_frl.task.checkpoint import FILE as CHECKPOINT
from flwr_frl.task.files import refuse_links


class TensorBoard(Tracker):
    """Writes to ``URI/ALGORITHM-RUN``; ``tensorboard`` in the results by default."""

    def start(self, about: About) -> None:
        """Write the settings as hyper-parameters; drop what a resumed run repeats."""
        folder = Path(self.uri or about.directory.parent / "tensorboard")
        if not self.uri:
            refuse_links("output", folder)
        place = folder / f"{about.algorithm}-{about.run}"
        again = about.after + 1 if about.after else None
        # Otherwise a file is called by the second in which it is made.
        suffix = f".{about.after}"
        self.writer = SummaryWriter(
            str(place), purge_step=again, filename_suffix=suffix
        )
        if not about.after:
            measures = dict.fromkeys(("train-loss", *QUALITY), 0)
            for part in hparams(dict(about.settings), measures):
                self.writer.file_writer.add_summary(part)
        self.after = about.after
        self.writer.add_text("checkpoint", str(about.directory / CHECKPOINT))
        self.writer.flush()

    def add(self, server_round: int, metrics: Mapping[str, float]) -> None:
        """Write a point of each curve."""
        self.after = server_round
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, server_round)
        self.writer.flush()

    def end(
        self, finished: bool, metrics: Mapping[str, float], files: Sequence[Path]
    ) -> None:
        """Write the result and the plot."""
        for name, value in metrics.items():
            self.writer.add_scalar(f"result/{name}", value, self.after)
        for path in files:
            if path.suffix == ".png":
                with Image.open(path) as image:
                    pixels = np.asarray(image.convert("RGB"))
                self.writer.add_image(path.name, pixels, self.after, dataformats="HWC")
        self.writer.close()
