from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import CLIENTS
from deploy_commands import command
from federation import BIN, Federation, local_flower


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=4, help="kills in test_chaos.py")


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    federation = Federation(tmp_path)
    try:
        yield federation
    finally:
        federation.close()


@pytest.fixture
def five(tmp_path: Path) -> Iterator[Federation]:
    """A federation with TLS and registered keys for the devices of the chaos test."""
    federation = Federation(tmp_path, CLIENTS)
    try:
        yield federation
    finally:
        federation.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the local SuperLink, to which outputs of runs are relative."""
    return tmp_path_factory.mktemp("local")


@pytest.fixture(scope="module")
def local(home: Path) -> Iterator[dict[str, str]]:
    """The environment of Flower's programs with one local SuperLink."""
    with local_flower(home / ".flwr") as environment:
        # Flower allows 15 seconds for its start, which is not enough in a new
        # environment or on a busy machine.
        words = (BIN / "flwr", "list", "local")
        where = {"env": environment, "cwd": home}
        for _ in range(5):
            if command(*words, seconds=240, **where).returncode == 0:
                break
        yield environment
