"""The colour and line style of each method, the same in every picture and page."""

from collections.abc import Iterable
from itertools import product
from random import Random

# Ten colours that people with colour vision deficiencies can tell apart
# (Petroff 2021, arXiv:2107.02270), as in matplotlib's ``petroff10``.
COLOURS = (
    *("#3f90da", "#ffa90e", "#94a4a2", "#bd1f01", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
# Line styles of matplotlib. Each is used with all colours before the next one is.
STYLES = ("-", "--", ":", "-.")
# With it, methods that are often compared have different colours.
SALT = 23232


def looks(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the colour and line style of each method of a comparison, by name.

    A method's name determines its look; only if that is taken in this comparison, it
    has the next one that is free.
    """
    every = [(colour, style) for style, colour in product(STYLES, COLOURS)]
    found = dict[str, tuple[str, str]]()
    for name in sorted(methods):
        first = Random(f"{name}{SALT}").randrange(len(COLOURS))
        order = every[first:] + every[:first]
        found[name] = next((x for x in order if x not in found.values()), every[first])
    return found
