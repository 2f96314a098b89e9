"""Virtual environments with the current dependencies, and a wheel of our package."""

import sys
from pathlib import Path

import flwr
from deploy_commands import command

PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def build_wheel(root: Path, folder: Path) -> Path:
    """Build the source archive, and from it the wheel, as a release does."""
    words = (sys.executable, "-m", "build", "--outdir", folder, root)
    command(*words, seconds=300, check=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def make_environment(folder: Path) -> Path:
    """Create an environment without the checkout; return its site-packages."""
    words = (sys.executable, "-m", "venv", "--without-pip", folder)
    command(*words, seconds=300, check=True)
    [site] = folder.glob("lib/python*/site-packages")
    # Python ignores .pth files, such as that of the checkout, in a folder that is added
    # by a .pth file itself. So only the dependencies are available.
    (site / "dependencies.pth").write_text(str(Path(flwr.__file__).parents[1]))
    # Flower starts its programs by name, so they must use this environment's Python.
    for script in Path(sys.executable).parent.glob("fl*"):
        text = script.read_text(encoding="utf-8").splitlines(keepends=True)
        copy = folder / "bin" / script.name
        copy.write_text(f"#!{folder}/bin/python\n" + "".join(text[1:]))
        copy.chmod(0o755)
    return site


def install(wheel: Path, site: Path) -> None:
    words = (*PIP, "install", "--no-deps", "--target", site, wheel)
    command(*words, seconds=300, check=True)
