"""PFLlib: its unchanged ``main.py``, with notes and the job's clients.

PFLlib would test all clients on all their examples before the first round, even with
the largest evaluation interval. The test is skipped, because it is not timed. The
driver runs in the folder ``system`` of a copy of PFLlib.
"""

import os
import runpy
import sys
from typing import Any

from benchmarks.peer_apps.work import Counter, Job, Softmax


def watch(server: type[Any], job: Job, counter: Counter) -> None:
    """Make a server class sample the job's clients and record the end of each round."""
    aggregate, rounds = server.aggregate_parameters, iter(job.sampled)
    ended = []

    def select(self: Any) -> list[Any]:
        self.current_num_join_clients = self.num_join_clients
        return [self.clients[i] for i in next(rounds)]

    def noted(self: Any) -> None:
        aggregate(self)
        job.note(counter.steps)
        ended.append(True)
        if len(ended) == len(job.sampled):
            job.keep(self.global_model.parameters())

    def evaluate(self: Any) -> None:
        # PFLlib computes the maximum of this list at the end.
        self.rs_test_acc.append(0.0)

    server.select_clients, server.aggregate_parameters = select, noted
    server.evaluate = evaluate


def main() -> None:
    """Carry out the job, with PFLlib's own arguments."""
    sys.path.insert(0, os.getcwd())
    from flcore.servers.serverbase import Server
    from flcore.trainmodel import models

    # PFLlib's logistic regression has 60 inputs for an unknown data set.
    models.Mclr_Logistic = lambda inputs, num_classes: Softmax(num_classes)
    watch(Server, Job.read(), Counter().watch())
    sys.argv[0] = "main.py"
    runpy.run_path("main.py", run_name="__main__")


if __name__ == "__main__":
    main()
