"""FedRep's and FLUTE's Table 1, CIFAR-10 columns, as published."""

# Clients x shards per client. The first cell is completed before the others.
CELLS = ("100x5", "100x2", "50x5", "50x2", "1000x2")


def _columns(*values: float | None) -> dict[str, float]:
    pairs = zip(CELLS, values, strict=False)
    return {cell: value for cell, value in pairs if value is not None}


def _fedrep(first: float, second: float, third: float) -> dict[str, float]:
    return _columns(second, first, None, None, third)


def _flute(
    first: float, second: float, third: float, fourth: float
) -> dict[str, float]:
    return _columns(fourth, third, second, first)


# For each method, the row of our page and the accuracy in %, in the order of the
# paper's columns. A global method uses the row of its fine-tuned version, before
# fine-tuning.
PAPERS: dict[str, dict[str, tuple[str, dict[str, float]]]] = {
    # Collins et al., ICML 2021: 100x2, 100x5, 1000x2.
    "FedRep, Table 1": {
        "Local only": ("local", _fedrep(89.79, 70.68, 78.30)),
        "FedAvg": ("fedavg", _fedrep(42.65, 51.78, 44.31)),
        "FedAvg+FT": ("fedavg-ft", _fedrep(87.65, 73.68, 82.04)),
        "FedProx": ("fedprox", _fedrep(39.92, 50.99, 21.93)),
        "FedProx+FT": ("fedprox-ft", _fedrep(85.81, 72.75, 75.41)),
        "SCAFFOLD": ("scaffold", _fedrep(37.72, 47.33, 33.79)),
        "SCAFFOLD+FT": ("scaffold-ft", _fedrep(86.35, 68.23, 78.24)),
        "Fed-MTL": ("fed-mtl", _fedrep(80.46, 58.31, 76.53)),
        "Per-FedAvg": ("per-fedavg", _fedrep(82.27, 67.20, 67.36)),
        "LG-FedAvg": ("lg-fedavg", _fedrep(84.14, 63.02, 77.48)),
        "L2GD": ("l2gd", _fedrep(81.04, 59.98, 71.96)),
        "APFL": ("apfl", _fedrep(83.77, 72.29, 82.39)),
        "Ditto": ("ditto", _fedrep(85.39, 70.34, 80.36)),
        "FedPer": ("fedper", _fedrep(87.13, 73.84, 81.73)),
        "FedRep": ("fedrep", _fedrep(87.70, 75.68, 83.27)),
    },
    # Liu et al., ICML 2024: 50x2, 50x5, 100x2, 100x5.
    "FLUTE, Table 1": {
        "FedAvg": ("fedavg", _flute(34.46, 47.22, 41.58, 51.88)),
        "FedAvg-FT": ("fedavg-ft", _flute(84.00, 71.47, 84.69, 70.88)),
        "Fed-LG": ("lg-fedavg", _flute(82.72, 61.82, 83.02, 62.96)),
        "FedPer": ("fedper", _flute(85.17, 74.02, 86.17, 73.67)),
        "FedRep": ("fedrep-1", _flute(86.13, 71.74, 86.69, 73.81)),
        "FedRep*": ("fedrep", _flute(87.32, 75.77, 87.18, 75.30)),
        "FedRoD": ("fedrod", _flute(79.48, 68.73, 83.30, 72.12)),
        "FedCP": ("fedcp", _flute(85.36, 71.60, 84.80, 71.34)),
        "FLUTE": ("flute", _flute(87.01, 76.48, 86.13, 76.92)),
        "FLUTE*": ("flute-star", _flute(87.71, 76.54, 88.57, 78.26)),
    },
}
