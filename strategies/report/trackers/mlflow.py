"""MLflow, by its client: a server, or whatever else a tracking URI can be."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from flwr_frl.strategies.report.trackers.base import About, Tracker
from flwr_frl.task.checkpoint import FILE as CHECKPOINT

# By which a resumed run is found again.
TAG = "flwr-frl.run"
# What a server takes at a time, and how long a parameter may be.
MOST_PARAMETERS, LONGEST = 100, 6000


class MLflow(Tracker):
    """A run of the experiment that the setting ``experiment`` names, or ``flwr-frl``.

    Without an address it is ``MLFLOW_TRACKING_URI``, or MLflow's own default.
    """

    def start(self, about: About) -> None:
        """Make a run with the settings as parameters, or find the one to go on with."""
        self.client = MlflowClient(self.uri or None)
        name = str(about.settings["experiment"]) or "flwr-frl"
        known = self.client.get_experiment_by_name(name)
        experiment = (
            known.experiment_id if known else self.client.create_experiment(name)
        )
        found = self.client.search_runs(
            [experiment], f"tags.`{TAG}` = '{about.run}'", max_results=1
        )
        if found:
            self.run = found[0].info.run_id
            self.client.update_run(self.run, "RUNNING")
            return
        tags = {TAG: about.run, "checkpoint": str(about.directory / CHECKPOINT)}
        made = self.client.create_run(experiment, run_name=about.algorithm, tags=tags)
        self.run = made.info.run_id
        parameters = [Param(n, str(v)[:LONGEST]) for n, v in about.settings.items()]
        for i in range(0, len(parameters), MOST_PARAMETERS):
            some = parameters[i : i + MOST_PARAMETERS]
            self.client.log_batch(self.run, params=some)

    def add(self, server_round: int, metrics: Mapping[str, float]) -> None:
        """Send a round's metrics in one request."""
        now = int(time.time() * 1000)
        sent = [Metric(n, float(v), now, server_round) for n, v in metrics.items()]
        self.client.log_batch(self.run, metrics=sent)

    def end(
        self, finished: bool, metrics: Mapping[str, float], files: Sequence[Path]
    ) -> None:
        """Send the result and the files."""
        now = int(time.time() * 1000)
        sent = [Metric(f"result/{n}", float(v), now, 0) for n, v in metrics.items()]
        if sent:
            self.client.log_batch(self.run, metrics=sent)
        for path in files:
            self.client.log_artifact(self.run, str(path))
        self.client.set_terminated(self.run, "FINISHED" if finished else "KILLED")
