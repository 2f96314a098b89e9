"""``--list``: complete, and printed without PyTorch and Flower."""

import subprocess
import sys
from pathlib import Path

from flwr_frl.command import main
from flwr_frl.task import names
from flwr_frl.task.models import MODELS
from flwr_frl.task.tasks import TASKS

ROOT = Path(__file__).parents[1]


def test_the_listed_names_are_those_of_the_tasks_and_models():
    assert tuple(TASKS) == names.TASKS
    assert {name: about for name, (_, about) in MODELS.items()} == names.MODELS


def test_listing_loads_neither_torch_nor_flower():
    code = """if True:
        import sys
        from flwr_frl.command import main
        main(["--list"])
        print(sorted({"flwr", "torch"} & set(sys.modules)))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert "algorithm  fedrep " in done.stdout
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_other_arguments_are_those_of_the_command_line(capsys):
    assert main(["--clients", "none"]) == 2
    assert "none" in capsys.readouterr().err
