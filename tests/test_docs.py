"""The documentation is current: generated pages, links, and code that runs."""

import json
import re
import shlex
import tomllib

import pytest

from docs import settings as settings_page
from docs.algorithm_pages import algorithm, algorithm_pages, command
from docs.links import DOCS, RESULTS, ROOT, for_site
from flwr_frl import simulate
from flwr_frl.cli import parse
from flwr_frl.common.settings import load
from flwr_frl.running import check
from flwr_frl.strategies.algorithms import ALGORITHMS


def test_the_page_of_settings_and_pyproject_are_current():
    written = settings_page.PAGE.read_text(encoding="utf-8")
    assert written == settings_page.page(), "run `python -m docs.settings`"
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert text == settings_page.with_settings(text)


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "deploy" / "README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "methods").glob("*.md")),
    *sorted((DOCS / "tutorials").glob("*.md")),
    *sorted(RESULTS.glob("*.md")),
]


def prose(path) -> str:
    """Return a page without its code."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    kept = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in kept}


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_of_a_page_has_a_target(path):
    for link in re.findall(r"\]\(([^()\s]+)\)", prose(path)):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_has_at_most_900_words():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        *(f"docs/{n}.md" for n in ("compare", "errors", "flower-app", "table")),
    ],
)
def test_the_python_blocks_of_a_page_run(name, monkeypatch, tmp_path):
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- python -->\n```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert blocks


def test_every_algorithm_has_a_page_with_its_settings():
    pages = algorithm_pages()
    assert pages.keys() >= {f"algorithms/{name}.md" for name in ALGORITHMS}
    assert "| `ditto-lambda` | `0.1` |" in pages["algorithms/ditto.md"]
    table = pages["algorithms/all.txt"]
    assert all(f"(/algorithms/{name}.md)" in table for name in ALGORITHMS)


def test_pfllib_s_algorithms_are_listed_with_ours():
    tables = tomllib.loads((DOCS / "pfllib.toml").read_text(encoding="utf-8"))
    here, missing = tables["here"], tables["missing"]
    assert len(here | missing) == 40
    found = {**here, **{name: name.lower() for name in missing}}
    table = algorithm_pages()["algorithms/pfllib.txt"]
    for theirs, ours in found.items():
        assert (f"| `{theirs}` | [`{ours}`]" in table) == (ours in ALGORITHMS)


@pytest.mark.parametrize("name", ["choco-sgd", "multi-task", "fedrep", "fedbn"])
def test_the_command_on_the_page_of_an_algorithm_passes_the_checks(name):
    _, words, _ = command(algorithm(name)).split("\n", 2)
    namespace, given = parse(shlex.split(words)[1:])
    assert namespace.algorithms == [name]
    check([name], given, "inline")


def test_the_further_names_of_the_reference_exist():
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    paths = re.findall(r"^\.\. auto\w+:: ([\w.]+)\.(\w+)$", text, re.MULTILINE)
    assert [load(f"{module}:{name}", "name") for module, name in paths]


def test_links_of_a_page_lead_to_pages_of_the_site():
    file = DOCS / "privacy.md"
    text = "[a](../deploy/README.md#8-containers), [b](settings.md), [c](https://d.e)"
    there = "[a](/project/deploy.md#8-containers), [b](/settings.md), [c](https://d.e)"
    assert for_site(text, file) == there
    # Code is unchanged, and files without a page lose their link.
    code = "```\n[b](settings.md)\n```"
    assert for_site(code, file) == code
    assert for_site("[f](../tests)", file) == "f"
    assert for_site("[f](../clients/fedrep.py)", file) == "f"


SMALL = {"backend": "inline", "clients": 5, "seed": 1, "model": "mlp-2"}
SMALL |= {"evaluate_every": 1, "cohort": "off"}


def test_the_guide_s_code_gives_the_examples_of_a_run(monkeypatch, tmp_path, capsys):
    more = {**SMALL, "rounds": 1, "fraction": 1.0, "output": str(tmp_path / "results")}
    simulate("fedrep", **more)
    text = (DOCS / "your-task.md").read_text(encoding="utf-8")
    before, _, after = text.partition("task = build_task(config")
    code = before.rpartition("```python\n")[2] + "task = build_task(config" + after
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(code.partition("```")[0], {})
    clients = json.loads((tmp_path / "results/fedrep/clients.json").read_text())
    assert int(capsys.readouterr().out) == clients["000003"]["num-test-examples"]
