"""Trackers of somebody else's: one remembers, the others fail."""

from flwr_frl.strategies.report.trackers import Tracker


class Recorder(Tracker):
    """Remembers what it is told."""

    told: list = []  # noqa: RUF012

    def start(self, about):
        self.told.append(("start", about))

    def add(self, server_round, metrics):
        self.told.append((server_round, metrics))

    def end(self, finished, metrics, files):
        self.told.append((finished, metrics, [path.name for path in files]))


class Failing(Recorder):
    """Fails in the method that is its address."""

    ended: list = []  # noqa: RUF012

    def __init__(self, uri):
        super().__init__(uri)
        self.fail("init")

    def fail(self, where):
        if self.uri == where:
            raise OSError(f"no {where}\nfor anybody")

    def start(self, about):
        self.fail("start")

    def add(self, server_round, metrics):
        if server_round == 2:
            self.fail("add")

    def end(self, finished, metrics, files):
        self.ended.append((self.uri, finished, metrics, files))
        self.fail("end")


class Exiting(Tracker):
    def start(self, about):
        raise SystemExit(3)
