"""Finished runs in Python and notebooks: tables, plots, models and predictions."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from flwr_frl.common.errors import require, unknown
from flwr_frl.common.text import short_name
from flwr_frl.predict.predictor import Inputs, Prediction, Predictor
from flwr_frl.predict.runs import TrainedRun
from flwr_frl.results.figures import figure_of, image_of
from flwr_frl.results.results import NEWCOMERS, Row, describe, read_object
from flwr_frl.results.runs import StoredRun, read_run
from flwr_frl.results.tables import cells, legend, terminal
from flwr_frl.task.models import SplitModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Run", "Runs"]


class Run:
    """The finished runs of one algorithm, one for each seed.

    Parameters
    ----------
    summary : dict
        The algorithm's part of ``summary.json``; with several seeds the means.
    runs : sequence of StoredRun
        The run of each seed.

    Attributes
    ----------
    algorithm : str
        Name of the algorithm.
    settings : dict of int to mapping
        All settings of the run of each seed.
    folders : dict of int to Path
        The folder with the files of the run of each seed.
    """

    def __init__(self, summary: dict[str, Any], runs: Sequence[StoredRun]) -> None:
        self.summary = summary
        # A later run may replace the files.
        self._runs = {int(run.settings["seed"]): run for run in runs}
        self.settings = {seed: dict(run.settings) for seed, run in self._runs.items()}
        self.algorithm = short_name(str(runs[0].settings["algorithm"]))
        self.folders = {seed: run.directory for seed, run in self._runs.items()}

    @property
    def rows(self) -> list[Row]:
        """The rows of ``metrics.jsonl``, one per round, without clients' metrics.

        With several seeds, each row has its ``seed``.
        """
        runs = self._runs.items()
        return [self._of(seed) | row for seed, run in runs for row in run.rows]

    @property
    def rounds(self) -> Any:
        """`rows` as a data frame if pandas is installed, otherwise as they are."""
        return _frame(self.rows)

    @property
    def clients(self) -> Any:
        """Each client's numbers of examples and last metrics, as `rounds`."""
        return _frame(self._client_rows())

    def model(self, client: str = "", seed: int | None = None) -> SplitModel:
        """Return a client's model, with the parts ``representation`` and ``head``.

        Parameters
        ----------
        client : str, default ""
            Name of the client; not needed if clients have no personal arrays.
        seed : int, optional
            Seed of the run, by default the first one.

        Raises
        ------
        SettingsError
            If there is no such client or seed, or a later run has replaced the files.
        """
        return self._predictor(client, seed).model

    def predict(
        self, x: Inputs, client: str = "", seed: int | None = None
    ) -> Prediction:
        """Predict with a client's model; see `Predictor` for the inputs ``x``."""
        return self._predictor(client, seed)(x)

    def plot(self) -> "Figure":
        """Return a figure of accuracy (or error) and training loss by round."""
        return Runs({self.algorithm: self}).plot()

    def _of(self, seed: int) -> Row:
        return {"seed": seed} if len(self.settings) > 1 else {}

    def _client_rows(self) -> list[Row]:
        return [
            {**self._of(seed), "client": name, **metrics}
            for seed, run in self._runs.items()
            for name, metrics in run.final.items()
        ]

    def _predictor(self, client: str, seed: int | None) -> Predictor:
        seeds = list(self.settings)
        seed = seeds[0] if seed is None else seed
        require(seed in seeds, "seed", seed, f"one of {', '.join(map(str, seeds))}")
        run, folder = self._runs[seed], self.folders[seed]
        known = {**run.final, **read_object(folder / NEWCOMERS)}
        if client and client not in known:
            raise unknown("client", client, known)
        replaced = read_run(folder).rows != run.rows
        allowed = "a folder with this run, which a later one has replaced"
        require(not replaced, "output", str(folder), allowed)
        # The user has named all settings of this run.
        return TrainedRun.read(folder, run.settings).predictor(client, "")

    def __repr__(self) -> str:
        """Return the main results and the folder in one line."""
        result = f"{describe(self.summary)} ({self.summary.get('protocol')})"
        seeds = f", {len(self.settings)} seeds" if len(self.settings) > 1 else ""
        folder = os.path.commonpath(list(self.folders.values()))
        return f"<Run {self.algorithm}: {result}{seeds}, in {folder!r}>"


class Runs(dict[str, Run]):
    """The finished runs of several algorithms, by their names."""

    @property
    def summary(self) -> Any:
        """The summaries, one row per algorithm, as `Run.rounds`."""
        return _frame([{"algorithm": n, **run.summary} for n, run in self.items()])

    @property
    def rounds(self) -> Any:
        """`Run.rounds` of all algorithms."""
        every = ((n, row) for n, run in self.items() for row in run.rows)
        return _frame([{"algorithm": name, **row} for name, row in every])

    @property
    def clients(self) -> Any:
        """`Run.clients` of all algorithms."""
        every = ((n, row) for n, run in self.items() for row in run._client_rows())
        return _frame([{"algorithm": name, **row} for name, row in every])

    def plot(self) -> "Figure":
        """Return a figure of accuracy (or error) and training loss by round."""
        runs = {name: run._runs.values() for name, run in self.items()}
        figure = figure_of({n: [run.rows for run in of] for n, of in runs.items()})
        # Notebooks show other figures only after pyplot has made one.
        setattr(figure, "_repr_png_", lambda: image_of(figure, "png"))  # noqa: B010
        return figure

    def __repr__(self) -> str:
        """Return a table of the results, and what it means; "" without runs."""
        if not self:
            return ""
        summaries = {name: run.summary for name, run in self.items()}
        return terminal(cells(summaries)) + legend(summaries)


def _frame(records: list[Row]) -> Any:
    """Return records as a data frame if pandas is installed."""
    if find_spec("pandas") is None:
        return records
    from pandas import DataFrame

    return DataFrame(records)
