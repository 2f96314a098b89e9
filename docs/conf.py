"""Sphinx configuration of the documentation: ``sphinx-build -W -b html docs OUTPUT``.

Before Sphinx reads any page, `docs.pages` writes the generated ones: algorithms,
results, the reference, and copies of files outside of ``docs``.
"""

import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# Tutorials run in separate processes.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The progress bar warns that widgets are missing, which a static page cannot show.
os.environ.setdefault("PYTHONWARNINGS", "ignore:install:UserWarning")

import flwr_frl  # noqa: E402
from docs.links import for_site  # noqa: E402
from docs.notebooks import with_link  # noqa: E402
from docs.pages import write_pages  # noqa: E402

project = "flwr-frl"
author = "The flwr-frl contributors"
copyright = "The flwr-frl contributors"
release = version = flwr_frl.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "numpydoc",
    "sphinx_copybutton",
    "sphinx_design",
]
# The generated pages contain the texts of ``methods``.
exclude_patterns = ["_build", "methods", "**/.ipynb_checkpoints"]
templates_path: list[str] = []

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
# A tutorial is a Markdown file with a kernel in its header; it runs at every build.
nb_execution_mode = "force"
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
# Backquotes in docstrings are names of Python objects.
default_role = "py:obj"

html_theme = "pydata_sphinx_theme"
html_title = f"flwr-frl {release}"
html_favicon = "_static/logo.svg"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_sidebars = {"index": []}
html_theme_options = {
    "logo": {
        "image_light": "_static/logo.svg",
        "image_dark": "_static/logo.svg",
        "text": html_title,
    },
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "navigation_depth": 3,
    "header_links_before_dropdown": 7,
    "navbar_persistent": [],
    "navbar_end": ["search-button", "theme-switcher", "navbar-icon-links"],
    "footer_start": ["copyright"],
    "footer_end": [],
    # Not for algorithms, which need the width.
    "secondary_sidebar_items": {
        "[!a]*": ["page-toc"],
        "[!a]*/*": ["page-toc"],
        "architecture": ["page-toc"],
    },
}
# GitHub's runners set this variable.
if repository := os.environ.get("GITHUB_REPOSITORY"):
    html_theme_options["github_url"] = f"https://github.com/{repository}"


def _relink(app: Any, name: str, source: list[str]) -> None:
    """Link to pages of the site instead of files, and from tutorials to Colab."""
    path = Path(app.env.doc2path(name))
    source[0] = with_link(for_site(source[0], path), path)


def _is_foreign(app: Any, what: str, name: str, found: Any, *_: Any) -> bool | None:
    """Skip class members that other packages define, such as a loss function."""
    module = getattr(found, "__module__", None) or "flwr_frl"
    return None if module.startswith("flwr_frl") else True


def _escape_bars(app: Any, what: str, name: str, *rest: Any) -> None:
    """Escape bars in docstrings, as in ``|S|``, which would be substitutions."""
    lines: list[str] = rest[-1]
    for i, line in enumerate(lines):
        parts = re.split(r"(`+[^`]*`+)", line)
        parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
        lines[i] = "".join(parts)


def setup(app: Any) -> None:
    """Write the generated pages, and connect the links."""
    # Before numpydoc rewrites the docstring.
    app.connect("autodoc-process-docstring", _escape_bars, priority=100)
    app.connect("autodoc-skip-member", _is_foreign)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    app.connect("builder-inited", lambda app: write_pages(Path(app.srcdir)))
    app.connect("source-read", _relink)
