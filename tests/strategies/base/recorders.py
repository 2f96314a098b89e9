"""Third-party trackers: one records its calls, the others fail."""

from flwr_frl.results.trackers import Tracker


class Recorder(Tracker):
    """Records its calls."""

    told: list = []  # noqa: RUF012

    def start(self, about):
        self.told.append(("start", about))

    def add(self, server_round, metrics):
        self.told.append((server_round, metrics))

    def end(self, finished, metrics):
        self.told.append((finished, metrics))


class Failing(Recorder):
    """Fails in the method that its URI names."""

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

    def end(self, finished, metrics):
        self.ended.append((self.uri, finished))
        self.fail("end")


class Exiting(Tracker):
    def start(self, about):
        raise SystemExit(3)
