"""Give a device that arrives after the training its own part of the model.

``python -m flwr_frl.clients.personalize --checkpoint results/fedrep --data-dir
/srv/images
--client-name pi-9 --state-dir /var/lib/flwr-frl/state`` fits a head (or what else the
algorithm leaves to a device) to the trained representation, which stays as it is, for
``newcomer-epochs`` of the run's settings. ``flwr_frl.clients.predict`` with the same
names then uses it, and a later run in which the device takes part goes on from it.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from flwr_frl.clients.personalize.fitting import Fitted, personalize
from flwr_frl.clients.predict.naming import name_settings, named_in
from flwr_frl.task.command_line import Parser
from flwr_frl.task.settings import SettingsError
from flwr_frl.task.sgd import TrainingDivergedError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 after one line that says what is wrong."""
    parser = Parser(
        prog="python -m flwr_frl.clients.personalize",
        description=__doc__,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="the server's DIR/ALGORITHM")
    add("--data-dir", required=True, help="the device's data")
    add("--client-name", default="", help="its name; by default that of --data-dir")
    add("--state-dir", default="", help="as in the node config; by default beside it")
    name_settings(parser)
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    try:
        options = parser.parse_args(arguments)
        name = options.client_name or Path(options.data_dir).resolve().name
        fitted = personalize(
            *(options.checkpoint, options.data_dir, name),
            *(options.state_dir, options.device, options.task, options.algorithm),
            named=named_in(options),
        )
    except (SettingsError, TrainingDivergedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(said(fitted))
    command = ["--checkpoint", str(options.checkpoint), "--client-name", name]
    if options.state_dir:
        command += ["--state-dir", options.state_dir]
    for flag in ("task", "algorithm"):
        if value := getattr(options, flag):
            command += [f"--{flag}", value]
    if options.run_config:
        command += ["--run-config", *options.run_config]
    if not fitted.has_images:
        command += ["--data-dir", options.data_dir]
    print(f"python -m flwr_frl.clients.predict FILES {shlex.join(command)}")
    return 0


def said(fitted: Fitted) -> str:
    """Return what came out, in one line."""
    text = f"fitted on {fitted.num_examples} examples"
    if "accuracy" in fitted.metrics and fitted.num_test_examples:
        text += f", accuracy {fitted.metrics['accuracy']:.2%}"
    elif fitted.num_test_examples:
        text += f", loss {fitted.loss:.4g}"
    if fitted.num_test_examples:
        text += f" on {fitted.num_test_examples} test examples"
    return f"{text}; kept in {fitted.path}"


if __name__ == "__main__":
    sys.exit(main())
