"""Write the generated pages of the site; `docs.conf` calls it before every build.

They are copies of files outside of ``docs``, a page for each algorithm
(`docs.algorithm_pages`), and one for the exported names of each package.
"""

import inspect
import shutil
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

from docs.algorithm_pages import algorithm_pages
from docs.links import COPIES, IMAGES, RESULTS, ROOT, for_site

GENERATED = ("algorithms", "project", "reference", "results")
# Pages of the reference: title and package.
REFERENCE = {
    "run": ("Running", "flwr_frl.running"),
    "strategies": ("Strategies", "flwr_frl.strategies"),
    "clients": ("Clients", "flwr_frl.clients"),
    "task": ("Tasks, models and local training", "flwr_frl.task"),
}


def write_pages(folder: Path) -> None:
    """Write all generated pages below a folder, the site's source."""
    pages = {**copies(), **algorithm_pages(), **reference_pages()}
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
    for picture in sorted(RESULTS.iterdir()):
        if picture.suffix in IMAGES:
            shutil.copyfile(picture, folder / "results" / picture.name)


def copies() -> dict[str, str]:
    """Return the pages whose text is outside of ``docs``, by their files."""
    pages = {}
    for path, name in COPIES.items():
        file = ROOT / path
        pages[f"{name}.md"] = for_site(file.read_text(encoding="utf-8"), file)
    return pages


def reference_pages() -> dict[str, str]:
    """Return the pages of the reference by their files."""
    pages = {}
    for page, (title, package) in REFERENCE.items():
        module = import_module(package)
        entries = [_entry(getattr(module, name), name) for name in module.__all__]
        pages[f"reference/{page}.md"] = "\n".join([f"# {title}\n", *entries])
    return pages


def _entry(found: Any, name: str) -> str:
    """Return the directive that documents an object where it is defined."""
    found = inspect.unwrap(found) if callable(found) else found
    is_class = inspect.isclass(found)
    if not (is_class or inspect.isfunction(found)):
        return f"`{name}`\n: The constant `{textwrap.shorten(repr(found), 70)}`.\n"
    kind = "autoclass" if is_class else "autofunction"
    options = "\n   :members:\n   :show-inheritance:" if is_class else ""
    path = f"{found.__module__}.{found.__qualname__}"
    return f"```{{eval-rst}}\n.. {kind}:: {path}{options}\n```\n"
