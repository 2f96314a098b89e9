"""Convert links of Markdown files, so that the text works on GitHub and on the site.

In the repository, pages link each other by relative paths, many of which lead out of
``docs``. For the site, every link to a file of the repository becomes the absolute path
of the page that shows it.
"""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
# Files outside of ``docs`` that are pages of the site.
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
# Pages of the site for links to folders and to the README.
ELSEWHERE = {
    "README.md": "index",
    "deploy": "project/deploy",
    "benchmarks/results": "results",
}
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
IMAGES = (".png", ".svg")


def for_site(text: str, file: Path) -> str:
    """Return the text of a file with its links converted for the site.

    Parameters
    ----------
    text : str
        Markdown.
    file : Path
        The file of the repository that contains the text.

    Returns
    -------
    str
        The text. Links to anything but files of the repository are unchanged.
    """

    def replaced(match: re.Match[str]) -> str:
        words, link = match.groups()
        target = _target(link.partition("#")[0], file)
        if target is None:
            return match[0]
        page = _page(target)
        # The site has no page for other files and folders of the repository.
        return words if page is None else f"[{words}]({page}{_anchor(link)})"

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(replaced, part) for part in parts[::2]]
    return "".join(parts)


def _target(link: str, file: Path) -> str | None:
    if not link or "://" in link or link.startswith(("/", "mailto:")):
        return None
    target = Path(os.path.normpath(file.parent / link))
    if not target.is_relative_to(ROOT) or not target.exists():
        return None
    return target.relative_to(ROOT).as_posix()


def _anchor(link: str) -> str:
    """Return the part of a link from ``#`` on; empty without one."""
    return link[len(link.partition("#")[0]) :]


def _page(target: str) -> str | None:
    """Return a file's or folder's address on the site; None if it has no page."""
    if target.endswith(IMAGES):
        inside = target.startswith("docs/")
        return "/" + (target[5:] if inside else f"results/{Path(target).name}")
    if target in COPIES or target in ELSEWHERE:
        name = COPIES.get(target) or ELSEWHERE[target]
    elif target.startswith("docs/") and target.endswith(".md"):
        name = target.removeprefix("docs/").removesuffix(".md")
        name = name.replace("methods/", "algorithms/")
    else:
        return None
    return f"/{name}.md"
