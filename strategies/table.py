"""The table of built-in algorithms, which is listed without Flower."""

# Module and class in this package, and a one-line description, by name.
_TABLE = {
    "fedrep": ("fedrep:FedRep", "FedRep (Collins et al., ICML 2021)"),
    "fedper": ("fedper:FedPer", "FedPer (Arivazhagan et al., 2019)"),
    "lg-fedavg": ("lg_fedavg:LGFedAvg", "LG-FedAvg (Liang et al., 2020)"),
    "flute": ("flute:FLUTE", "FLUTE (Liu et al., ICML 2024)"),
    "flute-star": ("flute:FLUTEStar", "FLUTE with more head epochs"),
    "flute-regression": (
        "flute_regression:FLUTERegression",
        "FLUTE with the linear case's regularizer",
    ),
    "fedavg": ("fedavg:FedAvg", "FedAvg (McMahan et al., AISTATS 2017)"),
    "fedavg-ft": ("fedavg:FedAvg-ft", "FedAvg, with heads fine-tuned in the end"),
    "fedprox": ("fedprox:FedProx", "FedProx (Li et al., MLSys 2020)"),
    "fedprox-ft": ("fedprox:FedProx-ft", "FedProx, fine-tuned in the end"),
    "scaffold": ("scaffold:SCAFFOLD", "SCAFFOLD (Karimireddy et al., ICML 2020)"),
    "scaffold-ft": ("scaffold:SCAFFOLD-ft", "SCAFFOLD, fine-tuned in the end"),
    "ditto": ("ditto:Ditto", "Ditto (Li et al., ICML 2021)"),
    "apfl": ("apfl:APFL", "APFL (Deng et al., 2020)"),
    "pfedme": ("pfedme:PFedMe", "pFedMe (T. Dinh et al., NeurIPS 2020)"),
    "fedbabu": ("fedbabu:FedBABU", "FedBABU (Oh et al., ICLR 2022)"),
    "fedbn": ("fedbn:FedBN", "FedBN (Li et al., ICLR 2021)"),
    "fedproto": ("fedproto:FedProto", "FedProto (Tan et al., AAAI 2022)"),
    "fedala": ("fedala:FedALA", "FedALA (Zhang et al., AAAI 2023)"),
    "feddbe": ("feddbe:FedDBE", "FedDBE (Zhang et al., NeurIPS 2023)"),
    "per-fedavg": (
        "per_fedavg:PerFedAvg",
        "Per-FedAvg (FO) (Fallah et al., NeurIPS 2020)",
    ),
    "hf-maml": (
        "per_fedavg:HFMAML",
        "Per-FedAvg (HF), with the Hessian part of the gradient",
    ),
    "l2gd": ("l2gd:L2GD", "L2GD (Hanzely & Richtárik, 2020)"),
    "fed-mtl": (
        "fed_mtl:FedMTL",
        "mean-regularised multi-task learning (Smith et al., 2017)",
    ),
    "fedrod": ("fedrod:FedRoD", "FedRoD (Chen & Chao, ICLR 2022)"),
    "fedcp": ("fedcp:FedCP", "FedCP (Zhang et al., KDD 2023)"),
    "moon": ("moon:MOON", "MOON (Li et al., CVPR 2021)"),
    "feddyn": ("feddyn:FedDyn", "FedDyn (Acar et al., ICLR 2021)"),
    "fedpac": ("fedpac:FedPAC", "FedPAC (Xu et al., ICLR 2023)"),
    "fedas": ("fedas:FedAS", "FedAS (Yang et al., CVPR 2024)"),
    "gpfl": ("gpfl:GPFL", "GPFL (Zhang et al., ICCV 2023)"),
    "pfedfda": ("pfedfda:PFedFDA", "pFedFDA (McLaughlin & Su, NeurIPS 2024)"),
    "fedamp": ("fedamp:FedAMP", "FedAMP (Huang et al., AAAI 2021)"),
    "fedfomo": ("fedfomo:FedFomo", "FedFomo (Zhang et al., ICLR 2021)"),
    "ifca": ("ifca:IFCA", "IFCA (Ghosh et al., NeurIPS 2020)"),
    "pfedhn": ("pfedhn:PFedHN", "pFedHN (Shamsian et al., ICML 2021)"),
    "knn-per": ("knn_per:KNNPer", "kNN-Per (Marfoq et al., ICML 2022)"),
    "fedsa-lora": ("fedsa_lora:FedSALoRA", "FedSA-LoRA (Guo et al., ICLR 2025)"),
    "ffa-lora": ("ffa_lora:FFALoRA", "FFA-LoRA (Sun et al., ICLR 2024)"),
    "feddpa": ("feddpa:FedDPA", "FedDPA (Yang et al., NeurIPS 2024)"),
    "local": ("local:Local", "local training only"),
    "srpfl": (
        "srpfl:SRPFL",
        "SRPFL (Tziotis et al., TMLR 2023) over fedrep or srpfl-base",
    ),
    "lg-srpfl": ("srpfl:LGSRPFL", "SRPFL over lg-fedavg"),
    "flanp": ("srpfl:FLANP", "SRPFL over fedavg"),
    "flanp-ft": ("srpfl:FLANP-ft", "SRPFL over fedavg-ft"),
    "srpfl-flute": ("srpfl:SRPFLFLUTE", "SRPFL over flute"),
    "fedbuff": (
        "fedbuff:FedBuff",
        "FedBuff (Nguyen et al., AISTATS 2022) over fedavg or async-base",
    ),
    "fedasync": (
        "fedasync:FedAsync",
        "FedAsync (Xie et al., 2019) over fedavg or async-base",
    ),
    "dpsgd": ("dpsgd:DPSGD", "D-PSGD (Lian et al., NeurIPS 2017)"),
    "choco-sgd": ("choco_sgd:ChocoSGD", "CHOCO-SGD (Koloskova et al., ICML 2019)"),
    "squarm-sgd": ("squarm_sgd:SQuARMSGD", "SQuARM-SGD (Singh, UCLA 2024, chapter 3)"),
    "multi-task": (
        "multi_task:MultiTask",
        "multi-task optimisation on a graph (Singh 2024, ch. 4)",
    ),
    "representation-transfer": (
        "representation_transfer:RepresentationTransfer",
        "representation transfer (Singh, UCLA 2024, chapter 5)",
    ),
}
# Import path and description, by name.
ALGORITHMS = {
    n: (f"{__package__}.{path}", about) for n, (path, about) in _TABLE.items()
}
