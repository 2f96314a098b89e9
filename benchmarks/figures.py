"""The numbers in the README and the guides that come from pages of results.

``figures.toml`` has the places of the numbers, and expressions of the numbers in their
pages' JSON. A number in a text is correct if it is the number of the page, rounded to
the digits that the text has; ``never`` stands for a target that was not reached. In the
tables of ``docs/results.md``, every number must come from a page to which its row
links. The first column, which has settings, and the column of the paper are exempt.
"""

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from statistics import median as middle
from typing import Any, NamedTuple

from benchmarks.derived import published

PAGES = Path("benchmarks") / "results"
# The text with the tables of results
RESULTS_PAGE = "docs/results.md"
# The section with the papers' results
RESULTS = re.compile(r"^## The papers' results\n(.*?)^## ", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"never|(?<!\w)[-+]?\d+(?:,\d{3})*(?:\.\d+)?")
# Output of `git describe --abbrev=10`, which begins with a tag if there is one
CLEAN = re.compile(r"(?:.+-g)?[0-9a-f]{10,40}")
LINK = re.compile(r"\]\([^)]*\)")
Data = dict[str, Any]


class Figure(NamedTuple):
    """Numbers in a text, and where they come from.

    Parameters
    ----------
    file : str
        Path of the text, relative to the repository's root.
    pattern : str
        Regular expression that matches once; its groups contain the numbers.
    page : str
        Name of the page in ``benchmarks/results``.
    values : tuple of str
        Expressions of the numbers, in the order of the text; see `values_of`.
    """

    file: str
    pattern: str
    page: str
    values: tuple[str, ...]


def figures() -> list[Figure]:
    """Return all figures.

    In an entry with ``each``, {0}, {1}, … are replaced by the entries of each list.
    ``label`` and ``column`` are a cell of the table row that begins with the label.
    """
    path = Path(__file__).with_suffix(".toml")
    found = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["figure"]:
        file = entry.get("file", RESULTS_PAGE)
        for words in entry.get("each", [[]]):

            def filled(text: str, words: Any = words) -> str:
                for i, word in enumerate(words):
                    text = text.replace(f"{{{i}}}", str(word))
                return text

            pattern = filled(entry.get("pattern", ""))
            if "label" in entry:
                before = r"[^|\n]*\|" * int(filled(str(entry.get("column", 1))))
                label = re.escape(filled(entry["label"]))
                pattern = rf"^\| {label}{before}([^|\n]*)\|"
            values = tuple(map(filled, entry["values"]))
            found.append(Figure(file, pattern, filled(entry["page"]), values))
    return found


def at(data: Any, path: str) -> list[float]:
    """Return all numbers below a path, whose parts are names or patterns of names."""
    found = [data]
    for part in path.split("/") if path else ():
        step: list[Any] = []
        for each in found:
            if isinstance(each, list):
                first = -len(each) if part == "-1" else 0
                each = {str(i): inner for i, inner in enumerate(each, first)}
            if isinstance(each, dict):
                step += [each[name] for name in each if fnmatchcase(name, part)]
        found = step
    numbers: list[float] = []
    for each in found:
        if isinstance(each, dict | list):
            numbers += at(each, "*")
        elif isinstance(each, int | float):
            numbers.append(float(each))
    return numbers


def lead(data: Data, row: str, other: str, cell: str) -> float:
    """Return a row's lead in points, over the seeds that both rows have."""
    one, two = (
        {run["seed"]: run["accuracy"] for run in data["results"][name][cell]}
        for name in (row, other)
    )
    return 100 * fmean(one[seed] - two[seed] for seed in one.keys() & two.keys())


def ahead(data: Data, row: str, other: str, cell: str) -> list[float]:
    """Return how often a row is ahead of another at equal times, and of how many."""
    one, two = (
        data["results"][name][cell][0]["curve"]["time"] for name in (row, other)
    )
    pairs = [(a, b) for t, a, u, b in zip(*one[:2], *two[:2], strict=False) if t == u]
    return [sum(a > b for a, b in pairs), len(pairs)]


def rank(data: Data, name: str) -> int:
    """Return a row's place by its mean accuracy, among those without a failed run."""
    means = {}
    for row in data["results"]:
        counts = [len(at(data, f"results/{row}/*/*/{n}")) for n in ("accuracy", "seed")]
        if counts[0] >= counts[1]:
            cells = [
                at(data, f"results/{row}/{c}/*/accuracy") for c in data["results"][row]
            ]
            means[row] = fmean(fmean(cell) for cell in cells)
    return sorted(means, key=lambda row: -means[row]).index(name) + 1


def values_of(figure: Figure, data: Data) -> list[float]:
    """Return a figure's numbers.

    An expression is Python with these functions of paths (see `at`): ``mean`` (of the
    first path that has numbers), ``median``, ``count`` (of numbers, or of those that
    are at least ``least``), ``reached`` (those of several paths that are not
    NaN, or else NaN), ``rank`` and ``rows`` (of a leaderboard), ``lead`` and ``ahead``
    (of rows), and ``paper`` (the published result of a paper's method in a cell).
    """

    def mean(*paths: str) -> float:
        return fmean(next(filter(None, (at(data, path) for path in paths))))

    def reached(*paths: str) -> list[float]:
        there = [n for path in paths for n in at(data, path) if not math.isnan(n)]
        return there or [math.nan]

    def count(path: str, least: float = -math.inf) -> int:
        return sum(number >= least for number in at(data, path))

    functions: dict[str, Callable[..., Any]] = {
        "mean": mean,
        "median": lambda path: middle(at(data, path)),
        "count": count,
        "reached": reached,
        "rank": lambda name: rank(data, name),
        "rows": lambda: len(data["results"]),
        "lead": lambda *words: lead(data, *words),
        "ahead": lambda *words: ahead(data, *words),
        "paper": lambda paper, method, cell: published()[paper][method][cell],
    }
    found: list[float] = []
    for expression in figure.values:
        value = eval(expression, {"__builtins__": {}}, functions)
        found += value if isinstance(value, list) else [value]
    return found


def numbers(text: str) -> list[str]:
    """Return the numbers in a text, except those in link targets."""
    return NUMBER.findall(LINK.sub("]", text).replace("\u2212", "-"))


def agrees(written: str, value: float) -> bool:
    """Return whether a number is the value, rounded to the number's digits."""
    if written == "never" or math.isnan(value):
        return written == "never" and math.isnan(value)
    half = 0.5 * 10.0 ** -len(written.partition(".")[2])
    # The pages' JSON has six significant digits.
    return abs(float(written.replace(",", "")) - value) <= half + 1e-5 * abs(value)


def read(root: Path, page: str) -> Data | None:
    """Return a page's JSON, or None if it is missing."""
    path = root / PAGES / f"{page}.json"
    if not path.is_file():
        return None
    data: Data = json.loads(path.read_text(encoding="utf-8"))
    return data


def wrong_figures(root: Path) -> Iterator[str]:
    """Yield a line for each figure that differs from its page or has no page."""
    every = figures()
    texts = {f.file: (root / f.file).read_text(encoding="utf-8") for f in every}
    pages = {figure.page: read(root, figure.page) for figure in every}
    covered: set[int] = set()
    for figure in every:
        text = texts[figure.file]
        found = list(re.finditer(figure.pattern, text, re.MULTILINE))
        if len(found) != 1:
            yield (
                f"{figure.file}: {figure.page}'s figure is in {len(found)} places "
                f"and not in one: {figure.pattern}"
            )
            continue
        match = found[0]
        line = text.count("\n", 0, match.start(1)) + 1
        place = f"{figure.file}:{line}"
        covered.add(match.start(1))
        if f"{PAGES.name}/{figure.page}.md)" not in _around(text, match, figure.file):
            yield f"{place}: no link to {PAGES / figure.page}.md"
        data = pages[figure.page]
        if data is None:
            yield f"{place}: {PAGES / figure.page}.json is missing"
            continue
        written, values = numbers(" ".join(match.groups())), values_of(figure, data)
        if len(written) != len(values) or not all(map(agrees, written, values)):
            yield (
                f"{place}: says {', '.join(written)} and {figure.page} has "
                f"{', '.join(f'{value:.6g}' for value in values)}"
            )
    yield from _without_page(texts[RESULTS_PAGE], covered)


def _around(text: str, match: re.Match[str], file: str) -> str:
    """Return the text that must contain the link: a row, a paragraph or the file."""
    if file != RESULTS_PAGE:
        return text
    row = text[text.rfind("\n", 0, match.end()) + 1] == "|"
    space = "\n" if row else "\n\n"
    return text[text.rfind(space, 0, match.end()) : text.find(space, match.end())]


def _without_page(text: str, covered: set[int]) -> Iterator[str]:
    """Yield a line for each cell of the results whose numbers have no page."""
    section = RESULTS.search(text)
    if section is None:
        yield f"{RESULTS_PAGE}: has no section of the papers' results"
        return
    heads: list[str] = []
    at = section.start(1)
    for line in section.group(1).splitlines(keepends=True):
        begins = [at + i for i, character in enumerate(line) if character == "|"]
        cells = [part.strip() for part in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            heads = []
        elif not heads:
            heads = cells
        else:
            for i, part in list(enumerate(cells))[1:]:
                alone = heads[i : i + 1] != ["paper"] and begins[i] + 1 not in covered
                if alone and numbers(part):
                    number = text.count("\n", 0, at) + 1
                    yield f"{RESULTS_PAGE}:{number}: {part!r} has no page"
        at += len(line)


def commits(data: object) -> Iterator[str]:
    """Yield the commits of a page and of all its runs."""
    if isinstance(data, dict):
        if isinstance(commit := data.get("commit"), str):
            # An interrupted run also lists the commits with which it was resumed.
            yield from commit.split(", ")
        data = list(data.values())
    for inner in data if isinstance(data, list) else ():
        yield from commits(inner)


def dirty(root: Path, page: str) -> Iterator[str]:
    """Yield a line for each dirty commit, and if the page and its JSON disagree."""
    data = read(root, page)
    if data is None:
        return
    commit = data["about"]["commit"]
    for each in sorted(commits(data)):
        if not CLEAN.fullmatch(each):
            yield f"{PAGES / page}.md: {each} is no clean commit of git describe"
    text = (root / PAGES / f"{page}.md").read_text(encoding="utf-8")
    if f"at commit {commit};" not in text:
        yield f"{PAGES / page}.md: not the commit {commit} of its JSON"
