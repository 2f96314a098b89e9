"""Notebooks of the tutorials for Colab, and the links that open them.

``python -m docs.notebooks FOLDER`` writes the notebooks without outputs. Their first
cell installs the package if it runs in Colab. The workflow ``docs.yml`` publishes them
with the site, in the branch from which Colab reads.
"""

import re
import sys
from pathlib import Path

import nbformat
from myst_nb.core.read import read_myst_markdown_notebook

from docs.links import DOCS, for_site
from flwr_frl.common.settings import pyproject

PROJECT = pyproject()["project"]
SITE, REPOSITORY = PROJECT["urls"]["Documentation"], PROJECT["urls"]["Repository"]
COLAB = "https://colab.research.google.com/github/" + REPOSITORY.split("/", 3)[3]
FIRST = f"""import sys

if "google.colab" in sys.modules:
    %pip install -q "flwr-frl[simulation]=={PROJECT["version"]}" pandas"""
# The tutorial of devices starts Flower's servers and needs a checkout.
OTHERS = ("index", "devices")
TUTORIALS = [p for p in (DOCS / "tutorials").glob("*.md") if p.stem not in OTHERS]
LINK = re.compile(r"\]\(/([\w/-]+)\.md(#[\w-]+)?\)")


def with_link(text: str, path: Path) -> str:
    """Return a page's text; a tutorial's has a link to Colab below its title."""
    if path not in TUTORIALS:
        return text
    link = f"[Open in Colab]({COLAB}/blob/gh-pages/tutorials/{path.stem}.ipynb)"
    return re.sub(r"^(# .*\n)", rf"\1\n{link}\n", text, count=1, flags=re.M)


def notebook(path: Path) -> nbformat.NotebookNode:
    """Return a tutorial as a notebook, with absolute links."""
    text = for_site(path.read_text(encoding="utf-8"), path)
    book = read_myst_markdown_notebook(LINK.sub(rf"]({SITE}/\1.html\2)", text))
    book.cells.insert(0, nbformat.v4.new_code_cell(FIRST))
    return book


def main() -> None:
    """Write the notebooks into the folder of the first argument."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for path in TUTORIALS:
        nbformat.write(notebook(path), folder / f"{path.stem}.ipynb")


if __name__ == "__main__":
    main()
