"""The task ``transfer``: the data of `task.transfer` as what every algorithm trains."""

from dataclasses import dataclass

from task.base import RegressionTask
from task.settings import Settings
from task.transfer import TEST_EXAMPLES, TransferData


@dataclass(frozen=True)
class TransferTask(TransferData, RegressionTask):
    """Table 5.1's sources and targets, with a linear split model.

    Parameters
    ----------
    **data
        As for `TransferData`.
    """

    test_draw = 1
    test_samples = TEST_EXAMPLES

    @classmethod
    def from_settings(cls, settings: Settings) -> "TransferTask":
        """Return the task of ``dimension``, ``num-sources`` and so on.

        Parameters
        ----------
        settings : mapping
            All settings.

        Returns
        -------
        TransferTask
            The task.
        """
        return cls(
            dimension=int(settings["dimension"]),
            rank=int(settings["rank"]),
            num_sources=int(settings["num-sources"]),
            source_samples=int(settings["source-samples"]),
            target_samples=int(settings["target-samples"]),
            ratio_db=float(settings["ratio-db"]),
            tau=float(settings["tau"]),
            noise_variance=float(settings["noise-variance"]),
            seed=int(settings["seed"]),
        )
