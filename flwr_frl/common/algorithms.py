"""The table of built-in algorithms, which is listed without Flower."""

# Module and class among the strategies, and a one-line description, by name.
_TABLE = {
    "fedrep": ("fedrep:FedRep", "FedRep (Collins et al., ICML 2021)"),
    "fedper": ("averaging:FedPer", "FedPer (Arivazhagan et al., 2019)"),
    "lg-fedavg": ("averaging:LGFedAvg", "LG-FedAvg (Liang et al., 2020)"),
    "flute": ("flute:FLUTE", "FLUTE (Liu et al., ICML 2024)"),
    "flute-star": ("flute:FLUTEStar", "FLUTE* (Liu et al., ICML 2024)"),
    "fedavg": ("averaging:FedAvg", "FedAvg (McMahan et al., AISTATS 2017)"),
    "fedavg-ft": ("averaging:FedAvgFT", "FedAvg-FT (with heads fine-tuned in the end)"),
    "fedprox": ("averaging:FedProx", "FedProx (Li et al., MLSys 2020)"),
    "fedprox-ft": ("averaging:FedProxFT", "FedProx-FT (fine-tuned in the end)"),
    "scaffold": ("scaffold:SCAFFOLD", "SCAFFOLD (Karimireddy et al., ICML 2020)"),
    "scaffold-ft": ("scaffold:SCAFFOLDFT", "SCAFFOLD-FT (fine-tuned in the end)"),
    "fedcross": ("fedcross:FedCross", "FedCross (Hu et al., ICDE 2024)"),
    "fednova": ("fednova:FedNova", "FedNova (Wang et al., NeurIPS 2020)"),
    "mime": ("mime:Mime", "Mime (Karimireddy et al., NeurIPS 2021)"),
    "mimelite": ("averaging:MimeLite", "MimeLite (Karimireddy et al., NeurIPS 2021)"),
    "q-fedavg": ("q_fedavg:QFedAvg", "q-FedAvg (Li et al., ICLR 2020)"),
    "afl": ("afl:AFL", "AFL (Mohri et al., ICML 2019)"),
    "ditto": ("averaging:Ditto", "Ditto (Li et al., ICML 2021)"),
    "apfl": ("averaging:APFL", "APFL (Deng et al., 2020)"),
    "pfedme": ("averaging:PFedMe", "pFedMe (T. Dinh et al., NeurIPS 2020)"),
    "fedbabu": ("averaging:FedBABU", "FedBABU (Oh et al., ICLR 2022)"),
    "fedbn": ("averaging:FedBN", "FedBN (Li et al., ICLR 2021)"),
    "fedproto": ("fedproto:FedProto", "FedProto (Tan et al., AAAI 2022)"),
    "fedgh": ("fedgh:FedGH", "FedGH (Yi et al., ACM MM 2023)"),
    "fedtgp": ("fedtgp:FedTGP", "FedTGP (Zhang et al., AAAI 2024)"),
    "fd": ("fd:FD", "FD (Jeong et al., 2018)"),
    "fml": ("averaging:FML", "FML (Shen et al., 2020)"),
    "fedkd": ("fedkd:FedKD", "FedKD (Wu et al., Nature Communications 2022)"),
    "fedmrl": ("averaging:FedMRL", "FedMRL (Yi et al., NeurIPS 2024)"),
    "fedala": ("averaging:FedALA", "FedALA (Zhang et al., AAAI 2023)"),
    "feddbe": ("feddbe:FedDBE", "FedDBE (Zhang et al., NeurIPS 2023)"),
    "per-fedavg": ("averaging:PerFedAvg", "Per-FedAvg (Fallah et al., NeurIPS 2020)"),
    "hf-maml": ("averaging:HFMAML", "HF-MAML (Fallah et al., AISTATS 2020)"),
    "l2gd": ("averaging:L2GD", "L2GD (Hanzely & Richtárik, 2020)"),
    "fed-mtl": ("averaging:FedMTL", "Fed-MTL (Smith et al., NeurIPS 2017)"),
    "fedrod": ("averaging:FedRoD", "FedRoD (Chen & Chao, ICLR 2022)"),
    "fedcp": ("averaging:FedCP", "FedCP (Zhang et al., KDD 2023)"),
    "moon": ("averaging:MOON", "MOON (Li et al., CVPR 2021)"),
    "fedlc": ("averaging:FedLC", "FedLC (Zhang et al., ICML 2022)"),
    "fedntd": ("averaging:FedNTD", "FedNTD (Lee et al., NeurIPS 2022)"),
    "feddyn": ("feddyn:FedDyn", "FedDyn (Acar et al., ICLR 2021)"),
    "fedpac": ("fedpac:FedPAC", "FedPAC (Xu et al., ICLR 2023)"),
    "fedas": ("fedas:FedAS", "FedAS (Yang et al., CVPR 2024)"),
    "gpfl": ("averaging:GPFL", "GPFL (Zhang et al., ICCV 2023)"),
    "pfedfda": ("averaging:PFedFDA", "pFedFDA (McLaughlin & Su, NeurIPS 2024)"),
    "fedphp": ("averaging:FedPHP", "FedPHP (Li et al., ECML PKDD 2021)"),
    "fedamp": ("fedamp:FedAMP", "FedAMP (Huang et al., AAAI 2021)"),
    "fedfomo": ("fedfomo:FedFomo", "FedFomo (Zhang et al., ICLR 2021)"),
    "apple": ("apple:APPLE", "APPLE (Luo & Wu, IJCAI 2022)"),
    "fedcac": ("fedcac:FedCAC", "FedCAC (Wu et al., ICCV 2023)"),
    "ifca": ("ifca:IFCA", "IFCA (Ghosh et al., NeurIPS 2020)"),
    "cfl": ("cfl:CFL", "CFL (Sattler et al., IEEE TNNLS 2021)"),
    "fedem": ("averaging:FedEM", "FedEM (Marfoq et al., NeurIPS 2021)"),
    "pfedhn": ("pfedhn:PFedHN", "pFedHN (Shamsian et al., ICML 2021)"),
    "ccvr": ("ccvr:CCVR", "CCVR (Luo et al., NeurIPS 2021)"),
    "knn-per": ("averaging:KNNPer", "kNN-Per (Marfoq et al., ICML 2022)"),
    "fedcgs": ("fedcgs:FedCGS", "FedCGS (Guan et al., 2025): heads in one round"),
    "fed3r": ("fedcgs:Fed3R", "Fed3R (Fanì et al., ICML 2024): a head in one round"),
    "fedsa-lora": ("averaging:FedSALoRA", "FedSA-LoRA (Guo et al., ICLR 2025)"),
    "ffa-lora": ("averaging:FFALoRA", "FFA-LoRA (Sun et al., ICLR 2024)"),
    "feddpa": ("averaging:FedDPA", "FedDPA (Yang et al., NeurIPS 2024)"),
    "local": ("averaging:Local", "Local training"),
    "srpfl": ("srpfl:SRPFL", "SRPFL (Tziotis et al., TMLR 2023)"),
    "lg-srpfl": ("srpfl:LGSRPFL", "LG-SRPFL (SRPFL over LG-FedAvg)"),
    "flanp": ("srpfl:FLANP", "FLANP (Reisizadeh et al., 2022; SRPFL over FedAvg)"),
    "flanp-ft": ("srpfl:FLANPFT", "FLANP-FT (SRPFL over FedAvg-FT)"),
    "srpfl-flute": ("srpfl:SRPFLFLUTE", "FLUTE-SRPFL (SRPFL over FLUTE)"),
    "fedbuff": ("fedbuff:FedBuff", "FedBuff (Nguyen et al., AISTATS 2022)"),
    "fedasync": ("fedasync:FedAsync", "FedAsync (Xie et al., 2019)"),
    "dpsgd": ("relaying:DPSGD", "D-PSGD (Lian et al., NeurIPS 2017)"),
    "choco-sgd": ("relaying:ChocoSGD", "CHOCO-SGD (Koloskova et al., ICML 2019)"),
    "squarm-sgd": ("relaying:SQuARMSGD", "SQuARM-SGD (Singh, UCLA 2024, chapter 3)"),
    "multi-task": (
        "multi_task:MultiTask",
        "Multi-task optimisation (Singh, UCLA 2024, chapter 4)",
    ),
    "representation-transfer": (
        "representation_transfer:RepresentationTransfer",
        "Representation transfer (Singh, UCLA 2024, chapter 5)",
    ),
}
# Strategies that replace others with certain tasks, by the other one and the task.
_CASES = {
    ("fedrep:FedRep", "linear"): "fedrep:FedRepLinear",
    ("fedrep:FedRep", "linear-table"): "fedrep:FedRepLinear",
    ("flute:FLUTE", "linear"): "flute:FLUTELinear",
    ("flute:FLUTE", "linear-table"): "flute:FLUTELinear",
    ("multi_task:MultiTask", "qcqp"): "multi_task:SyntheticMultiTask",
    ("multi_task:MultiTask", "multi-task-logistic"): "multi_task:SyntheticMultiTask",
    **{
        ("representation_transfer:RepresentationTransfer", task): (
            "representation_transfer:RepresentationTransferLinear"
        )
        for task in ("transfer", "linear-table")
    },
}
# Algorithms whose models need LoRA adapters.
_OF_ADAPTERS = "averaging:FedSALoRA", "averaging:FFALoRA", "averaging:FedDPA"


def full(path: str) -> str:
    """Return the import path of ``module:Class`` among the strategies."""
    return f"flwr_frl.strategies.{path}"


def title(algorithm: str) -> str:
    """Return an algorithm's name as in its paper: its description up to the citation.

    Words after the name, such as a folder in brackets, are kept.
    """
    name, *words = algorithm.split(" ", 1)
    about = ALGORITHMS[name][1].partition(" (")[0] if name in ALGORITHMS else name
    return " ".join([about, *words])


# Import path and description, by name.
ALGORITHMS = {n: (full(path), about) for n, (path, about) in _TABLE.items()}
# Import paths, by import path and task.
CASES = {(full(path), task): full(case) for (path, task), case in _CASES.items()}
# Defaults of settings in simulation, by import path.
SIMULATION_DEFAULTS: dict[str, dict[str, bool | int | float | str]] = {
    **{full(path): {"adapters": "lora"} for path in _OF_ADAPTERS},
    # A round has one step.
    full("relaying:DPSGD"): {"learning-rate": 0.1, "num-server-rounds": 100},
    full("multi_task:MultiTask"): {"saddle-step": 0.03, "num-server-rounds": 100},
}
# Settings that all algorithms read. A default of these holds only in a command whose
# algorithms have it in common.
OF_ALL = {"learning-rate", "num-server-rounds", "fraction-train"}
