from collections.abc import Iterator
from pathlib import Path

import pytest
from federation import Federation


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    federation = Federation(tmp_path)
    try:
        yield federation
    finally:
        federation.close()
