from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import CLIENTS
from federation import Federation


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
