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
# With it, methods that are often compared have different colours and keep them.
SALT = 48296


def looks(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the colour and line style of each method of a comparison, by name.

    A method's name determines its look. If another method of the comparison comes first
    and has this look, it has the next one that is free.
    """
    random = {name: Random(f"{name}{SALT}") for name in methods}
    firsts = {name: draw.randrange(len(COLOURS)) for name, draw in random.items()}
    found = dict[str, tuple[str, str]]()
    for name in sorted(firsts, key=lambda name: random[name].random()):
        first = firsts[name]
        order = product(STYLES, COLOURS[first:] + COLOURS[:first])
        free = ((colour, style) for style, colour in order)
        taken = found.values()
        found[name] = next((x for x in free if x not in taken), (COLOURS[first], "-"))
    return found
