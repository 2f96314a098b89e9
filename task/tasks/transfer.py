"""The task ``transfer``: the data of `flwr_frl.task.transfer` for any algorithm."""

from dataclasses import dataclass

from flwr_frl.task.base import RegressionTask
from flwr_frl.task.transfer import TEST_EXAMPLES, TransferData


@dataclass(frozen=True)
class TransferTask(TransferData, RegressionTask):
    """Sources and targets of Table 5.1 (`TransferData`) with a linear split model."""

    test_draw = 1
    test_samples = TEST_EXAMPLES
