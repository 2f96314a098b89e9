"""A client that has said who it is, and whether its model is that of the others."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from flwr_frl.task.messages import (
    CLASSES_DIGEST,
    INPUTS,
    NEWCOMER,
    NUM_CLASSES,
    STRUCTURE,
)

# What clients say of their model, and must say alike: the digest alone counts.
COMPARED = (*INPUTS, CLASSES_DIGEST, NUM_CLASSES, STRUCTURE)


@dataclass(frozen=True)
class ClientInfo:
    """A client that has said who it is.

    Parameters
    ----------
    name : str
        The same in every run; the node id for a client that answers no queries.
    structure : str
        Digest of its shared arrays' names, shapes and dtypes.
    properties : mapping
        All that it said.
    """

    name: str
    structure: str
    properties: Mapping[str, Any]

    @property
    def is_newcomer(self) -> bool:
        """Whether it takes no part in the training."""
        return self.properties.get(NEWCOMER) is True


def vote(clients: Collection[ClientInfo]) -> dict[str, Any]:
    """Return what most clients say of their model."""
    by_structure = {p.structure: p.properties for p in clients}
    votes = Counter(p.structure for p in clients)
    # Ties go to the smaller digest, so that a restart decides alike.
    usual = min(votes, key=lambda structure: (-votes[structure], structure))
    said = by_structure[usual]
    own = {name: said[name] for name in COMPARED if name in said}
    return {**own, STRUCTURE: usual}


def difference(its: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Return why a client whose structure is not the usual one takes no part."""

    def inputs(said: Mapping[str, Any]) -> str:
        return " x ".join(str(said.get(name, "?")) for name in INPUTS)

    if inputs(its) != inputs(usual):
        return (
            f"its inputs are {inputs(its)} and those of the other clients are "
            f"{inputs(usual)} ({', '.join(INPUTS)})"
        )
    if its.get(CLASSES_DIGEST) != usual.get(CLASSES_DIGEST):
        return (
            f"its {its.get(NUM_CLASSES, '?')} classes are not those of the other "
            f"clients, who have {usual.get(NUM_CLASSES, '?')}: names and their order "
            "must be the same"
        )
    return (
        "its shared arrays are not of the names and shapes that the other clients "
        "have, or the model that it begins with is another one"
    )
