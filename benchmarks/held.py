"""Check the numbers in the README and the guides against the pages that they cite.

A number in a text is correct if it is the number in the page's JSON, rounded to the
digits that the text has; ``never`` stands for a target that was not reached. In the
tables of ``docs/results.md``, every number must come from a page to which its row
links. The first column, which has settings, and the column of the paper are exempt.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.claims_figures import CLAIMS_FIGURES
from benchmarks.figures import FIGURES, PAGES, RESULTS_PAGE
from benchmarks.page_values import Data
from benchmarks.readme_figures import README_FIGURES

ALL_FIGURES = (*FIGURES, *README_FIGURES, *CLAIMS_FIGURES)

# The section with the papers' results
RESULTS = re.compile(r"^## The papers' results\n(.*?)^## ", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"never|(?<!\w)[-+]?\d+(?:,\d{3})*(?:\.\d+)?")
# Output of `git describe --abbrev=10`, which begins with a tag if there is one
CLEAN = re.compile(r"(?:.+-g)?[0-9a-f]{10,40}")
LINK = re.compile(r"\]\([^)]*\)")


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
    texts = {f.file: (root / f.file).read_text(encoding="utf-8") for f in ALL_FIGURES}
    covered: set[int] = set()
    for figure in ALL_FIGURES:
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
        data = read(root, figure.page)
        if data is None:
            yield f"{place}: {PAGES / figure.page}.json is missing"
            continue
        written, values = numbers(" ".join(match.groups())), figure.values(data)
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
