"""The table of tested versions of Flower, Python and PyTorch.

``python -m docs.versions test`` runs tests with the installed versions and writes one
row, as the job `platforms` of ``.github/workflows/ci.yml`` does for each combination.
``python -m docs.versions`` writes the page.
"""

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from xml.etree.ElementTree import parse

import yaml

from docs.links import DOCS, ROOT
from flwr_frl.common.settings import version as package_version

PAGE, ROWS = DOCS / "tested-versions.md", DOCS / "tested-versions"
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
SYSTEMS = {"ubuntu-latest": "Linux", "windows-latest": "Windows"}
SYSTEMS |= {"macos-latest": "macOS", "Darwin": "macOS"}
# Neither Ray nor a package of an extra is needed.
TESTS = ["common", "clients/test_under_flower.py"]
TESTS += ["strategies/test_template_app.py", "simulation/test_from_python.py"]
TESTS += ["simulation/test_files.py", "simulation/test_results_in_python.py"]
COLUMNS = ("flwr", "python", "torch", "system", "flwr-frl", "date", "tests")
TEXT = """# Tested versions

Each row is a run of `python -m docs.versions test`, which needs no optional package.
The job `platforms` in `.github/workflows/ci.yml` runs it on each system with each
Python, and with the oldest Flower and PyTorch that `pyproject.toml` allows. A
combination that has not run yet is listed as such. With Python 3.11 on Linux, all tests
run, those of processes, devices and Ray included.

`python -m docs.versions` writes this page from the rows in `docs/tested-versions/`.

| Flower | Python | PyTorch | system | flwr-frl | date | tests |
| --- | --- | --- | --- | --- | --- | --- |
"""


def test() -> int:
    """Run the tests, write their row, and return their exit code."""
    files = [f"tests/{name}" for name in TESTS]
    report = ROOT / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *files]
    code = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT).returncode
    counts = {n: int(v) for n, v in parse(report).getroot()[0].items() if v.isdigit()}
    report.unlink()
    failed = counts["failures"] + counts["errors"]
    row = {name: version(name) for name in ("flwr", "torch")}
    row["python"], system = platform.python_version(), platform.system()
    row["system"] = f"{SYSTEMS.get(system, system)}, {platform.machine()}"
    row["flwr-frl"], row["date"] = package_version(), f"{datetime.now(UTC):%Y-%m-%d}"
    row["tests"] = f"{counts['tests'] - failed - counts['skipped']} passed"
    row["tests"] += f", {failed} failed" * bool(failed)
    ROWS.mkdir(exist_ok=True)
    name = "-".join([row["system"].split(",")[0], row["python"], row["flwr"]])
    path = ROWS / f"{name}-{row['torch'].partition('+')[0]}.json"
    path.write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
    return code


def page() -> str:
    """Return the page: all rows, and the combinations of the job that have none."""
    rows = [json.loads(path.read_text("utf-8")) for path in ROWS.glob("*.json")]
    job = yaml.safe_load(WORKFLOW.read_text("utf-8"))["jobs"]["platforms"]
    matrix = job["strategy"]["matrix"]
    done = {(r["system"].split(",")[0], r["python"].rpartition(".")[0]) for r in rows}
    for system in map(SYSTEMS.__getitem__, matrix["os"]):
        missing = [p for p in matrix["python"] if (system, p) not in done]
        rows += [{"python": p, "system": system, "tests": "not run"} for p in missing]

    def order(row: dict[str, str]) -> list[object]:
        numbers = [int(n) for n in row["python"].split(".")]
        return [row["system"], numbers, row.get("flwr", ""), row.get("torch", "")]

    rows.sort(key=order)
    unknown = {"flwr": "newest", "torch": "newest"}
    lines = (
        " | ".join((unknown | row).get(name, "") for name in COLUMNS) for row in rows
    )
    return TEXT + "".join(f"| {line} |\n" for line in lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["test"]:
        sys.exit(test())
    PAGE.write_text(page(), encoding="utf-8")
