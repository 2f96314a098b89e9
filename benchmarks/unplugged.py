"""Measure the cost of a device that is disconnected from the network during a run.

Three real devices train. One of them reaches the SuperLink through a cable: a proxy on
loopback that forwards no bytes while it is unplugged, so that connections hang as on a
dead line. No round may take longer than ``round-timeout`` plus an ordinary round.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.common import markdown, write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from devices import write_folders  # noqa: E402
from federation import Federation, free_port, read_lines  # noqa: E402

DEVICES = ("000000", "000001", "000002")
UNPLUGGED = DEVICES[-1]
# The device is disconnected after round OUT and reconnected after round IN.
OUT, IN, ROUNDS = 4, 9, 16


class Cable:
    """A TCP proxy to a port on loopback, in a separate thread."""

    def __init__(self, port: int) -> None:
        self.to = port
        self.port = free_port()
        self.loop = asyncio.new_event_loop()
        self.passes = asyncio.Event()
        self.passes.set()
        self.loop.run_until_complete(
            asyncio.start_server(self.connect, "127.0.0.1", self.port)
        )
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def plug(self, connected: bool) -> None:
        """Plug the cable in, or unplug it."""
        change = self.passes.set if connected else self.passes.clear
        self.loop.call_soon_threadsafe(change)

    async def connect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward the bytes of a connection in both directions."""
        there = await asyncio.open_connection("127.0.0.1", self.to)
        await asyncio.gather(self.pump(reader, there[1]), self.pump(there[0], writer))

    async def pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward bytes while the cable is plugged in; hold them while it is not."""
        try:
            while data := await reader.read(65536):
                await self.passes.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()


def measure(home: Path, timeout: float) -> list[dict[str, object]]:
    """Return a run's rows, with the seconds of each round as ``took``."""
    write_folders(home / "data", len(DEVICES))
    federation = Federation(home / "federation")
    try:
        federation.start_superlink()
        cable = Cable(federation.port)
        for name in DEVICES:
            config = f'client-name="{name}" data-dir="{home / "data" / name}"'
            port = cable.port if name == UNPLUGGED else 0
            federation.start_supernode(name, config, port=port)
        config = {
            "algorithm": "fedrep",
            "task": "image-folder",
            "model": "digits-cnn",
            "min-available-nodes": len(DEVICES),
            "fraction-train": 1.0,
            "num-server-rounds": ROUNDS,
            # Evaluations must not wait either, so every round has one.
            "evaluate-every": 1,
            "head-epochs": 1,
            "batch-size": 6,
            "round-timeout": timeout,
            "output": str(home / "output"),
        }
        text = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        run = federation.start(
            "run", "flwr", "run", str(ROOT), "test", "--stream", "--run-config", text
        )
        path = home / "output" / "fedrep" / "metrics.jsonl"
        while run.poll() is None and len(read_lines(path)) < OUT:
            time.sleep(0.1)
        cable.plug(False)
        while run.poll() is None and len(read_lines(path)) < IN:
            time.sleep(0.1)
        cable.plug(True)
        try:
            run.wait(ROUNDS * timeout)
        except subprocess.TimeoutExpired:
            print((federation.home / "run.log").read_text()[-5000:])
    finally:
        federation.close()
    rows = read_lines(path)
    before = 0.0
    for row in rows:
        row["took"] = float(str(row["seconds"])) - before
        before = float(str(row["seconds"]))
    return rows


def main() -> int:
    """Measure and write ``results/unplugged``; return 1 if a round took too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--round-timeout", type=float, default=30.0)
    timeout = parser.parse_args().round_timeout
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), timeout)
    usual = max(float(str(row["took"])) for row in rows[:OUT])
    longest = max(float(str(row["took"])) for row in rows)
    back = len(rows) == ROUNDS and rows[-1]["clients"] == len(DEVICES)
    good = back and longest <= timeout + usual
    body = (
        f"FedRep on a SuperLink and {len(DEVICES)} SuperNodes. After round {OUT} one "
        "of them is disconnected from the network, so that its connections hang, and "
        f"after round {IN} it is reconnected. `round-timeout` is {timeout:.0f} s, "
        "and every round includes an evaluation. Before the disconnection, a round "
        f"took up to {usual:.1f} s; the longest round took {longest:.1f} s. In the "
        f"last round the device {'trained' if back else 'did not train'} with the "
        "others.\n\n"
    ) + markdown(
        ["round", "seconds", "trained", "evaluated", "no training reply from"],
        [
            [
                row["round"],
                f"{row['took']:.1f}",
                row["clients"],
                row.get("evaluated", 0),
                ", ".join(row.get("unanswered-clients", [])),  # type: ignore[call-overload]
            ]
            for row in rows
        ],
    )
    write(
        "unplugged",
        "A device that is disconnected from the network",
        body,
        {"rows": rows},
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
