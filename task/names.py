"""Names of the built-in tasks, and names and descriptions of the built-in models.

Listing them does not import PyTorch.
"""

# Tasks whose data is generated or installed with a package.
GENERATED = ("digits", "linear", "transfer", "qcqp", "multi-task-logistic")
DOWNLOADED = ("mnist", "emnist", "cifar10", "cifar100")
# Tasks that read their data from data-dir.
IN_FOLDERS = (
    *("table", "linear-table", "image-folder", "femnist"),
    *("text-folder", "hf-text"),
)
TASKS = (*GENERATED, *DOWNLOADED, *IN_FOLDERS)
MODELS = {
    "cifar10-cnn": "FedRep's and FLUTE's CNN for CIFAR-10",
    "cifar100-cnn": "FedRep's and FLUTE's CNN for CIFAR-100",
    "cifar100-cnn-srpfl": "SRPFL's CNN for CIFAR-100, with dropout after dense layers",
    "digits-cnn": "a small CNN for 8 x 8 to 28 x 28 images",
    "mlp": "SRPFL's MLP for EMNIST and FEMNIST",
    "mlp-2": "FedRep's two-layer MLP for FEMNIST (width 256)",
    "resnet20": "ResNet-20 for CIFAR-10 (He et al. 2016)",
    "logistic": "multinomial logistic regression, from 0",
    "cnn-1d": "a small CNN for windows of a series",
}
