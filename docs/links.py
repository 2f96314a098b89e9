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
        path, sharp, anchor = link.partition("#")
        target = Path(os.path.normpath(file.parent / path))
        is_file = target.is_relative_to(ROOT) and target.exists()
        if not path or ":" in path or path.startswith("/") or not is_file:
            return match[0]
        page = _page(target.relative_to(ROOT).as_posix())
        # The site has no page for other files and folders of the repository.
        return f"[{words}]({page}{sharp}{anchor})" if page else words

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(replaced, part) for part in parts[::2]]
    return "".join(parts)


def _page(target: str) -> str:
    """Return a file's or folder's address on the site; empty if it has no page."""
    if target.endswith(IMAGES):
        inside = target.startswith("docs/")
        return "/" + (target[5:] if inside else f"results/{Path(target).name}")
    name = {**COPIES, **ELSEWHERE}.get(target, "")
    if not name and target.startswith("docs/") and target.endswith(".md"):
        name = target.removeprefix("docs/").removesuffix(".md")
        name = name.replace("methods/", "algorithms/")
    return name and f"/{name}.md"
