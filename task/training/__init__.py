"""Local training: optimiser, training loop, training in cohorts, and privacy."""

from flwr_frl.common.settings import TrainingDivergedError
from flwr_frl.task.training.calls import (
    GradientCall,
    TrainCall,
    evaluation_size,
    features_of,
)
from flwr_frl.task.training.cohort import each_together, scratch_model
from flwr_frl.task.training.local_training import (
    evaluate,
    evaluate_each,
    gradient,
    train,
)
from flwr_frl.task.training.sgd import (
    SGD,
    OneExampleError,
    Proximal,
    Regularizer,
    Step,
    freeze,
    loop,
    steps_an_epoch,
    trainable_examples,
)
from flwr_frl.task.training.trainer import TrainerSettings
from flwr_frl.task.types import Loss

__all__ = [
    "SGD",
    "GradientCall",
    "Loss",
    "OneExampleError",
    "Proximal",
    "Regularizer",
    "Step",
    "TrainCall",
    "TrainerSettings",
    "TrainingDivergedError",
    "each_together",
    "evaluate",
    "evaluate_each",
    "evaluation_size",
    "features_of",
    "freeze",
    "gradient",
    "loop",
    "scratch_model",
    "steps_an_epoch",
    "train",
    "trainable_examples",
]
