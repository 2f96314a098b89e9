"""Fit the personal parameters of a device that arrives after the training.

``python -m flwr_frl.predict.personalize --checkpoint results/fedrep --data-dir
/srv/images --client-name pi-9 --state-dir /var/lib/flwr-frl/state`` fits a head, or the
algorithm's other personal parameters, for ``newcomer-epochs`` of the run's settings.
The checkpoint stays unchanged. ``flwr_frl.predict`` with the same options then
uses the result, and so does a later run in which the device takes part.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from flwr_frl.common.command_line import Parser
from flwr_frl.common.settings import SettingsError
from flwr_frl.predict.options import add_options, named_in
from flwr_frl.predict.personalize.fitting import Fitted, personalize
from flwr_frl.task.training import TrainingDivergedError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after printing a one-line error."""
    parser = Parser(
        prog="python -m flwr_frl.predict.personalize",
        description=__doc__,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="the server's DIR/ALGORITHM")
    add("--data-dir", required=True, help="the device's data")
    add("--client-name", default="", help="by default the name of --data-dir")
    add("--state-dir", default="", help="as in the node config")
    add_options(parser)
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
    command = ["--checkpoint", str(options.checkpoint), "--client-name", name]
    for flag in ("state-dir", "task", "algorithm"):
        if value := getattr(options, flag.replace("-", "_")):
            command += [f"--{flag}", value]
    if options.run_config:
        command += ["--run-config", *options.run_config]
    # Some models, such as pFedFDA's, depend on the device's data.
    command += ["--data-dir", options.data_dir]
    predict = f"python -m flwr_frl.predict FILES {shlex.join(command)}"
    for line in (_summary(fitted), predict):
        # Folder names need not be valid Unicode.
        encoded = line.encode("utf-8", "surrogateescape")
        print(encoded.decode("utf-8", "backslashreplace"))
    return 0


def _summary(fitted: Fitted) -> str:
    text = f"fitted on {fitted.num_examples} examples"
    if fitted.num_test_examples:
        result = f"loss {fitted.loss:.4g}"
        if "accuracy" in fitted.metrics:
            result = f"accuracy {fitted.metrics['accuracy']:.2%}"
        text += f", {result} on {fitted.num_test_examples} test examples"
    return f"{text}; kept in {fitted.path}"


if __name__ == "__main__":
    sys.exit(main())
