"""Write the generated pages of the site; `docs.conf` calls it before every build.

They are copies of files outside of ``docs``, a page for each algorithm
(`docs.algorithm_pages`), and the reference (`docs.api_pages`).
"""

import re
import shutil
import tomllib
from pathlib import Path

from docs.algorithm_pages import algorithm_pages
from docs.api_pages import api_pages
from docs.links import COPIES, DOCS, RESULTS, ROOT, for_site

GENERATED = ("algorithms", "project", "reference", "results")


def write_pages(folder: Path) -> None:
    """Write all generated pages below a folder, the site's source."""
    pages = {**copies(), **algorithm_pages(), **api_pages()}
    for name in GENERATED:
        for old in sorted((folder / name).glob("*.md")):
            if f"{name}/{old.name}" not in pages:
                old.unlink()
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        # Sphinx reads only changed files again.
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for picture in sorted(RESULTS.glob("*.png")):
        shutil.copyfile(picture, folder / "results" / picture.name)


def copies() -> dict[str, str]:
    """Return the pages whose text is outside of ``docs``, by their files."""
    sentences = what_results_show()
    pages = {}
    for path, name in COPIES.items():
        file = ROOT / path
        text = for_site(file.read_text(encoding="utf-8"), file)
        if name.startswith("results/"):
            title, _, rest = text.partition("\n")
            text = f"{title}\n\n**{sentences[file.stem]}**\n{rest}"
        pages[f"{name}.md"] = text
    return pages


def what_results_show() -> dict[str, str]:
    """Return a sentence for each page of results.

    It is taken from ``docs/results.md``, or from ``benchmarks/reproduce.toml`` if the
    page is not listed there.
    """
    index = DOCS / "results.md"
    text = for_site(index.read_text(encoding="utf-8"), index)
    listed = re.findall(
        r"^- \[[^\]]*\]\(/results/([^)]+)\.md\):\s+(.*(?:\n  .*)*)", text, re.MULTILINE
    )
    sentences = {name: " ".join(words.split()) for name, words in listed}
    table = (ROOT / "benchmarks" / "reproduce.toml").read_text(encoding="utf-8")
    benchmarks = tomllib.loads(table)
    for path in RESULTS.glob("*.md"):
        shows = benchmarks.get(path.stem, {}).get("shows", "Measured numbers")
        # The text after a semicolon states where the figures are used.
        sentences.setdefault(path.stem, f"{shows.partition(';')[0]}.")
    return sentences
