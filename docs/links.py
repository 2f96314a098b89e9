"""Links of Markdown files: the same text works on GitHub and in the built site.

In the repository, pages link each other by relative paths, many of which lead out of
``docs``. For the site, every link to a file of the repository becomes the absolute path
of the page that shows it.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
# Pages of the site whose text stands outside of ``docs``.
COPIES = {
    "deploy/README.md": "project/deploy",
    "CHANGELOG.md": "project/changelog",
    "CONTRIBUTING.md": "project/contributing",
    "SECURITY.md": "project/security",
    **{
        f"benchmarks/results/{path.name}": f"results/{path.stem}"
        for path in sorted(RESULTS.glob("*.md"))
    },
}
# Where a link to a folder, or to the page that GitHub shows first, leads.
ELSEWHERE = {
    "README.md": "index",
    "deploy": "project/deploy",
    "benchmarks/results": "results",
}
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
IMAGES = (".png", ".svg")


def for_site(text: str, file: Path) -> str:
    """Return the text of a file with its links as the site needs them.

    Parameters
    ----------
    text : str
        Markdown.
    file : Path
        The file of the repository that has it.

    Returns
    -------
    str
        The text. Links that lead to no file of the repository stay as they are.
    """

    def replaced(match: re.Match[str]) -> str:
        words, link = match.groups()
        target = _target(link.partition("#")[0], file)
        if target is None:
            return match[0]
        page = _page(target)
        # Nothing on the site shows other folders of the repository.
        return words if page is None else f"[{words}]({page}{_anchor(link)})"

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(replaced, part) for part in parts[::2]]
    return "".join(parts)


def linked_files(text: str, file: Path) -> Iterator[str]:
    """Yield the files of the repository, relative to its root, that a text links."""
    for part in FENCE.split(text)[::2]:
        for _, link in LINK.findall(part):
            found = _target(link.partition("#")[0], file)
            if found is not None:
                yield found


def source_page(path: str) -> str:
    """Return the name of the page that shows a source file of the repository."""
    return "source/" + path.replace("/", "-").replace(".", "-").lstrip("-")


def is_source(path: str) -> bool:
    """Return whether a file of the repository is shown as source code."""
    inside = path.startswith("docs/") and path.endswith((".md", *IMAGES))
    known = path in COPIES or path in ELSEWHERE or path.endswith(IMAGES)
    return not (inside or known) and (ROOT / path).is_file()


def _target(link: str, file: Path) -> str | None:
    if not link or "://" in link or link.startswith(("/", "mailto:")):
        return None
    target = Path(os.path.normpath(file.parent / link))
    if not target.is_relative_to(ROOT) or not target.exists():
        return None
    return target.relative_to(ROOT).as_posix()


def _anchor(link: str) -> str:
    """Return a link's part from ``#`` on."""
    return link[len(link.partition("#")[0]) :]


def _page(target: str) -> str | None:
    """Return the address on the site of a file or folder of the repository."""
    if target.endswith(IMAGES):
        inside = target.startswith("docs/")
        return "/" + (target[5:] if inside else f"results/{Path(target).name}")
    if target in COPIES or target in ELSEWHERE:
        name = COPIES.get(target) or ELSEWHERE[target]
    elif target.startswith("docs/") and target.endswith(".md"):
        name = target.removeprefix("docs/").removesuffix(".md")
    elif is_source(target):
        name = source_page(target)
    else:
        return None
    return f"/{name}.md"
