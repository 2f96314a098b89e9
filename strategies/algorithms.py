"""From an algorithm's name, or import path, to its strategy.

An algorithm is a strategy that names its client; a row here is all that one of ours
needs besides its two files. Anybody else's is ``package.module:Class``. A global method
has a fine-tuned variant, whose name or path ends with ``-ft``.
"""

from collections.abc import Iterable
from functools import cache
from typing import TypeVar, cast

from flwr_frl.strategies.hooks import RunHooks
from flwr_frl.task.settings import Settings, SettingsError, is_path, load, unknown

S = TypeVar("S", bound=RunHooks)
FINE_TUNED = "-ft"

# Name: import path, and one line about it.
ALGORITHMS = {
    "fedrep": (
        "flwr_frl.strategies.fedrep:FedRep",
        "FedRep (Collins et al., ICML 2021)",
    ),
    "fedper": (
        "flwr_frl.strategies.fedper:FedPer",
        "FedPer (Arivazhagan et al., 2019)",
    ),
    "lg-fedavg": (
        "flwr_frl.strategies.lg_fedavg:LGFedAvg",
        "LG-FedAvg (Liang et al., 2020)",
    ),
    "flute": ("flwr_frl.strategies.flute:FLUTE", "FLUTE (Liu et al., ICML 2024)"),
    "flute-star": (
        "flwr_frl.strategies.flute:FLUTEStar",
        "FLUTE with more head epochs",
    ),
    "fedavg": (
        "flwr_frl.strategies.fedavg:FedAvg",
        "FedAvg (McMahan et al., AISTATS 2017)",
    ),
    "fedavg-ft": (
        "flwr_frl.strategies.fedavg:FedAvg-ft",
        "FedAvg whose head every client fine-tunes in the end",
    ),
    "fedprox": (
        "flwr_frl.strategies.fedprox:FedProx",
        "FedProx (Li et al., MLSys 2020)",
    ),
    "fedprox-ft": (
        "flwr_frl.strategies.fedprox:FedProx-ft",
        "FedProx, fine-tuned in the end",
    ),
    "scaffold": (
        "flwr_frl.strategies.scaffold:SCAFFOLD",
        "SCAFFOLD (Karimireddy et al., ICML 2020)",
    ),
    "scaffold-ft": (
        "flwr_frl.strategies.scaffold:SCAFFOLD-ft",
        "SCAFFOLD, fine-tuned in the end",
    ),
    "ditto": ("flwr_frl.strategies.ditto:Ditto", "Ditto (Li et al., ICML 2021)"),
    "apfl": ("flwr_frl.strategies.apfl:APFL", "APFL (Deng et al., 2020)"),
    "pfedme": (
        "flwr_frl.strategies.pfedme:PFedMe",
        "pFedMe (T. Dinh et al., NeurIPS 2020)",
    ),
    "fedbabu": (
        "flwr_frl.strategies.fedbabu:FedBABU",
        "FedBABU (Oh et al., ICLR 2022)",
    ),
    "fedbn": ("flwr_frl.strategies.fedbn:FedBN", "FedBN (Li et al., ICLR 2021)"),
    "fedproto": (
        "flwr_frl.strategies.fedproto:FedProto",
        "FedProto (Tan et al., AAAI 2022)",
    ),
    "fedala": ("flwr_frl.strategies.fedala:FedALA", "FedALA (Zhang et al., AAAI 2023)"),
    "feddbe": (
        "flwr_frl.strategies.feddbe:FedDBE",
        "FedDBE (Zhang et al., NeurIPS 2023)",
    ),
    "per-fedavg": (
        "flwr_frl.strategies.per_fedavg:PerFedAvg",
        "Per-FedAvg (FO) (Fallah et al., NeurIPS 2020)",
    ),
    "hf-maml": (
        "flwr_frl.strategies.per_fedavg:HFMAML",
        "Per-FedAvg (HF): with the Hessian's part of the meta-gradient",
    ),
    "l2gd": ("flwr_frl.strategies.l2gd:L2GD", "L2GD (Hanzely & Richtárik, 2020)"),
    "fed-mtl": (
        "flwr_frl.strategies.fed_mtl:FedMTL",
        "mean-regularised multi-task learning (Smith et al., NeurIPS 2017)",
    ),
    "fedrod": ("flwr_frl.strategies.fedrod:FedRoD", "FedRoD (Chen & Chao, ICLR 2022)"),
    "fedcp": ("flwr_frl.strategies.fedcp:FedCP", "FedCP (Zhang et al., KDD 2023)"),
    "local": ("flwr_frl.strategies.local:Local", "local training only"),
    "srpfl": (
        "flwr_frl.strategies.srpfl:SRPFL",
        "SRPFL (Tziotis et al., TMLR 2023) over fedrep, or what srpfl-base names",
    ),
    "lg-srpfl": ("flwr_frl.strategies.srpfl:LGSRPFL", "SRPFL over lg-fedavg"),
    "flanp": ("flwr_frl.strategies.srpfl:FLANP", "SRPFL over fedavg"),
    "flanp-ft": ("flwr_frl.strategies.srpfl:FLANP-ft", "SRPFL over fedavg-ft"),
    "srpfl-flute": ("flwr_frl.strategies.srpfl:SRPFLFLUTE", "SRPFL over flute"),
    "dpsgd": ("flwr_frl.strategies.dpsgd:DPSGD", "D-PSGD (Lian et al., NeurIPS 2017)"),
    "choco-sgd": (
        "flwr_frl.strategies.choco_sgd:ChocoSGD",
        "CHOCO-SGD (Koloskova et al., ICML 2019)",
    ),
    "squarm-sgd": (
        "flwr_frl.strategies.squarm_sgd:SQuARMSGD",
        "SQuARM-SGD (Singh, UCLA 2024, chapter 3)",
    ),
    "multi-task": (
        "flwr_frl.strategies.multi_task:MultiTask",
        "decentralised multi-task optimisation (Singh, UCLA 2024, chapter 4)",
    ),
    "representation-transfer": (
        "flwr_frl.strategies.representation_transfer:RepresentationTransfer",
        "representation transfer (Singh, UCLA 2024, chapter 5)",
    ),
}


def strategy_class(settings: Settings) -> type[RunHooks]:
    """Return the strategy of the algorithm that the settings name.

    Parameters
    ----------
    settings : mapping
        ``algorithm``, a key of `ALGORITHMS` or an import path, and ``task``: a strategy
        may name another one for it in ``cases``.

    Returns
    -------
    type of Strategy
        The class.

    Raises
    ------
    SettingsError
        If there is no such algorithm, it cannot be imported, or is no strategy.
    """
    algorithm = str(settings["algorithm"])
    strategy = _load(_path(algorithm))
    # A subclass is another algorithm: its bases' cases are not its own.
    case = vars(strategy).get("task_overrides", {}).get(str(settings["task"]))
    return strategy if case is None else _load(case)


def _path(algorithm: str) -> str:
    if is_path(algorithm):
        return algorithm
    plain = algorithm.removesuffix(FINE_TUNED)
    if algorithm not in ALGORITHMS and plain in ALGORITHMS:
        return ALGORITHMS[plain][0] + FINE_TUNED
    if algorithm not in ALGORITHMS:
        raise unknown("algorithm", algorithm, ALGORITHMS)
    return ALGORITHMS[algorithm][0]


def _load(path: str) -> type[RunHooks]:
    plain = path.removesuffix(FINE_TUNED)
    found = load(plain, "algorithm")
    if not (isinstance(found, type) and issubclass(found, RunHooks)):
        raise SettingsError(
            f"algorithm {path!r} is no strategy; it must be a subclass of BaseStrategy "
            "or SRPFL"
        )
    return found if plain == path else fine_tuned(found)


@cache
def fine_tuned(kind: type[S]) -> type[S]:
    """Return a global method whose clients fine-tune the model's head in the end.

    The server does what it did; only the last round is evaluated, as each evaluation
    fine-tunes anew (FedRep, section 5.2). ``flwr_frl.clients.fine_tuning`` has the
    clients.

    Parameters
    ----------
    kind : type of Strategy
        The global method, or SRPFL over one.

    Returns
    -------
    type of Strategy
        A subclass of it, named like it with ``-ft``; always the same.
    """

    def client_path(cls: type[RunHooks], settings: Settings) -> str:
        path = kind.client_path(settings)
        return path and path + FINE_TUNED

    about = {
        "__doc__": f"{kind.__name__}; clients test it with a fine-tuned head.",
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__ + FINE_TUNED,
        "client": kind.client and kind.client + FINE_TUNED,
        "client_path": classmethod(client_path),
        "evaluate_last_round_only": True,
    }
    return cast(type[S], type(kind.__name__ + FINE_TUNED, (kind,), about))


def build_strategy(settings: Settings) -> RunHooks:
    """Return the strategy of the algorithm that the settings name.

    Raises `SettingsError` as `strategy_class` and `client_path` do, or if a setting is
    out of its range.
    """
    client_path(settings)
    return strategy_class(settings).from_settings(settings)


def client_path(settings: Settings) -> str:
    """Return the import path of the algorithm's client.

    Raises `SettingsError` if its strategy names none.
    """
    strategy = strategy_class(settings)
    path = strategy.client_path(settings)
    if not path or not isinstance(path, str):
        has = f"the client {path!r}" if path else "no client"
        raise SettingsError(
            f"algorithm {settings['algorithm']!r} has {has}; its attribute 'client' "
            "must be the import path of a subclass of Client"
        )
    return path


def settings_owners(settings: Settings) -> list[type]:
    """Return the strategies that read settings: the algorithm's, and one it wraps."""
    return strategy_class(settings).settings_owners(settings)


def short_name(algorithm: str) -> str:
    """Return how an algorithm is called in files and tables: a path by its class."""
    return algorithm.rpartition(":")[2]


def check_names(algorithms: Iterable[str]) -> None:
    """Raise unless all algorithms have names of their own.

    Parameters
    ----------
    algorithms : iterable of str
        Names and import paths.

    Raises
    ------
    SettingsError
        If two of them would write to the same place.
    """
    seen: dict[str, str] = {}
    for algorithm in algorithms:
        name = short_name(algorithm)
        if seen.setdefault(name, algorithm) != algorithm or (
            is_path(algorithm) and name in ALGORITHMS
        ):
            other = seen[name] if seen[name] != algorithm else name
            raise SettingsError(
                f"two algorithms are called {name!r}: {other!r} and {algorithm!r}; "
                "each must have a name of its own"
            )
