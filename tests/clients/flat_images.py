"""Image tasks with a custom model that is not registered under a name."""

from torch import nn

from flwr_frl.task import ImageTask, SplitModel
from flwr_frl.task.devices import seeded


class Flat(ImageTask):
    """Image folders with a model without convolutions."""

    def __init__(self, settings, num_clients):
        super().__init__("image-folder", settings, num_clients)

    def initial_model(self):
        inputs = int(self.shape[0] * self.shape[1] * self.shape[2])
        with seeded(self.seed):
            body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 6), nn.ReLU())
            return SplitModel(body, nn.Linear(6, self.num_classes))


class Wrong(Flat):
    """A task whose model expects more pixels than the images have."""

    def initial_model(self):
        return SplitModel(nn.Flatten(), nn.Linear(3072, self.num_classes))
