"""Print the newest release of flwr that pyproject.toml allows."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
requirements = map(Requirement, project["dependencies"])
[flower] = [r for r in requirements if r.name == "flwr"]
command = [sys.executable, "-m", "pip", "index", "versions", "flwr"]
output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
versions = re.search(r"Available versions: (.*)", output)
if versions is None:
    raise SystemExit(f"pip lists no versions of flwr: {output}")
allowed = flower.specifier.filter(versions[1].split(", "))
print(max(allowed, key=Version))
