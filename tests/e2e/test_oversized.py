"""What one device's reply costs the server's memory, however large it is."""

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from devices import write_folders
from federation import Federation, processes_with, read_lines

APP = Path(__file__).parent / "oversized_app"
NAMES = ("000000", "000001")
EXTRA = 100_000_000
PROGRAMS = ("flwr-serverapp", "flower-superlink")


@contextlib.contextmanager
def peaks(home: Path) -> Iterator[dict[str, int]]:
    """Yield the largest memory (MB) of each program of a federation so far."""
    found = dict.fromkeys(PROGRAMS, 0)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            for program in PROGRAMS:
                for pid in processes_with(f"FLWR_HOME={home / 'flwr'}", program):
                    with contextlib.suppress(OSError):
                        status = Path(f"/proc/{pid}/status").read_text()
                        if said := re.search(r"VmHWM:\s*(\d+)", status):
                            peak = int(said[1]) // 1024
                            found[program] = max(found[program], peak)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


@pytest.mark.e2e
def test_a_record_of_100_mb_is_refused_before_the_server_app_has_it(
    federation: Federation, tmp_path: Path
) -> None:
    write_folders(tmp_path / "data", len(NAMES))
    federation.start_superlink()
    for name in NAMES:
        config = f'client-name="{name}" data-dir="{tmp_path / "data" / name}"'
        if name == NAMES[1]:
            config += f' extra="{tmp_path / "extra"}"'
        federation.start_supernode(name, config)
    counted, memory = {}, {}
    for extra in (0, EXTRA):
        output = tmp_path / f"with-{extra}"
        with peaks(tmp_path) as found:
            if extra:
                (tmp_path / "extra").write_text(str(extra))
            log = federation.run(APP, f'output="{output}"', 600)
        rows = read_lines(output / "fedrep" / "metrics.jsonl")
        assert len(rows) == 1, log
        counted[extra] = [row["clients"] for row in rows]
        memory[extra] = found
        print(extra, found, [(r["rejected"], r["clients"]) for r in rows])
    assert counted == {0: [2], EXTRA: [1]}
    assert "reply of client 000001 is an error: the reply cannot be read" in log
    server = [memory[extra]["flwr-serverapp"] for extra in (0, EXTRA)]
    # Without the check it grows by more than five times the record.
    # Without the limit it grows by more than five times the record.
    assert server[1] < server[0] + 2 * EXTRA / 1e6, server
