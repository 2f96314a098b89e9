"""``--list`` and ``--help`` are complete, and printed without PyTorch and Flower."""

import sys

import pytest
from deploy_commands import ROOT, command

from flwr_frl.common.command_line import exit_code
from flwr_frl.strategies import ALGORITHMS
from flwr_frl.task import names
from flwr_frl.task.models import MODELS
from flwr_frl.task.tasks import TASKS


def test_the_listed_names_are_those_of_the_tasks_and_models():
    assert sorted(TASKS) == sorted(names.TASKS)
    assert MODELS.keys() == names.MODELS.keys()


def test_a_closed_pipe_ends_the_command_without_error(nobody_reads):
    def command() -> int:
        print("a line")
        return 0

    with nobody_reads():
        assert exit_code(command) == 0


@pytest.mark.e2e
@pytest.mark.parametrize("argument", ["--list", "--help"])
def test_listing_loads_neither_torch_nor_flower(argument):
    code = f"""if True:
        import sys
        from flwr_frl.cli import main
        try:
            main(["{argument}"])
        except SystemExit:
            pass
        print(sorted({{"flwr", "torch", "grpc"}} & set(sys.modules)))
    """
    done = command(sys.executable, "-c", code, cwd=ROOT)
    listed = {tuple(line.split()[:2]) for line in done.stdout.splitlines()}
    for name in ALGORITHMS:
        assert argument == "--help" or ("algorithm", name) in listed
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
