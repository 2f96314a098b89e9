"""Short texts for logs, tables and errors. Imports neither torch nor flwr."""

from collections.abc import Sequence

from flwr_frl.common.errors import printable

# Largest length of a client's text in a log line.
LONGEST_LINE = 300
# Largest number of names in a log line.
MOST_LISTED = 5


def one_line(text: object, longest: int = LONGEST_LINE) -> str:
    """Return a client's text as one line: escaped, at most ``longest`` characters."""
    # Do not process much more text than is returned.
    escaped = printable(" ".join(str(text)[: 20 * longest].split()))
    return escaped if len(escaped) <= longest else escaped[: longest - 1] + "…"


def several(names: Sequence[str]) -> str:
    """Return the first names as part of a line, and the number of the others."""
    more = len(names) - MOST_LISTED
    listed = ", ".join(names[:MOST_LISTED])
    return f"{listed} and {more:,} other{'s' * (more > 1)}" if more > 0 else listed


def short_name(algorithm: str) -> str:
    """Return an algorithm's name in files and tables; of an import path, the class."""
    return algorithm.rpartition(":")[2]
