"""Write the generated pages of the site; `docs.conf` calls it before every build.

They are copies of files outside of ``docs``, a page for each algorithm
(`docs.algorithm_pages`), and the reference (`docs.api_pages`).
"""

import shutil
from pathlib import Path

from docs.algorithm_pages import algorithm_pages
from docs.api_pages import api_pages
from docs.links import COPIES, RESULTS, ROOT, for_site

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
    pages = {}
    for path, name in COPIES.items():
        file = ROOT / path
        pages[f"{name}.md"] = for_site(file.read_text(encoding="utf-8"), file)
    return pages
