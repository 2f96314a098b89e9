"""Predict with the shared representation and a client's own head.

``python -m flwr_frl.predict FILES --checkpoint results/fedrep --client-name
pi-3 --state-dir /var/lib/flwr-frl/state`` combines the two. FILES are images, or text
files with one table row or text per line, depending on the task. ``--export
model.safetensors`` writes a built-in model of images or of a table to one file, and
``--model model.safetensors`` then needs nothing else. Code, folders and addresses that
only a checkpoint names are not used; name them with ``--task``, ``--algorithm``,
``--data-dir`` and ``--run-config``. Each output line holds the file or line, its class
and the probability, or the outputs if there are no classes, separated by tabs.

With ``--personalize``, a device that joins after the training first fits a head, or the
algorithm's other personal parameters, on the data in ``--data-dir``. Later predictions
with the same options use them.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from flwr_frl.common.command_line import Parser, exit_code, run_config
from flwr_frl.common.settings import require
from flwr_frl.predict.file_settings import FLAGS
from flwr_frl.predict.predictor import load_model
from flwr_frl.predict.runs import load_run, personalize


def parse(arguments: Sequence[str] | None) -> tuple[Namespace, dict[str, Any]]:
    """Parse the command line; return the arguments, and the settings among them."""
    parser = Parser(prog="python -m flwr_frl.predict", description=__doc__)
    add = parser.add_argument
    add("files", nargs="*", help="images, folders of images, or text files")
    add("--checkpoint", default="", help="the server's DIR/ALGORITHM")
    add("--client-name", default="", help="as in the node config")
    add("--state-dir", default="", help="as in the node config")
    add("--data-dir", default="", help="the client's data")
    add("--task", default="", help="task, if it is custom or downloads its data")
    add("--algorithm", default="", help="algorithm, if it is package.module:Class")
    text = "other settings that a file alone cannot set, such as weights"
    add("--run-config", nargs="*", action="extend", metavar="'k=v ...'", help=text)
    text = "fit the personal parameters of a device that joins after the training"
    add("--personalize", action="store_true", help=text)
    add("--model", help="a file that --export has written, in place of --checkpoint")
    add("--export", help="write the model to this .safetensors file")
    options = parser.parse_args(arguments)
    flags = {name: getattr(options, name.replace("-", "_")) for name in FLAGS}
    named = {name: text for name, text in flags.items() if text}
    return options, {**run_config(options.run_config or []), **named}


def _main(arguments: Sequence[str] | None) -> int:
    options, named = parse(arguments)
    something = bool(options.files or options.export or options.personalize)
    require(something, "files", options.files, "one or more, or --export FILE")
    path, name = options.checkpoint, options.client_name
    states = options.state_dir
    if options.personalize:
        fitted = personalize(path, options.data_dir, name, states, **named)
        results = {"loss": fitted.loss, **fitted.metrics}
        text = ", ".join(f"test {key} {value:.4g}" for key, value in results.items())
        print(f"fitted on {fitted.num_examples} examples: {text}; see {fitted.path}")
    if options.files or options.export:
        if options.model:
            predictor = load_model(options.model)
        else:
            predictor = load_run(path, name, states, **named)
        if options.export:
            predictor.export(options.export)
        for cells in predictor.rows(options.files):
            print("\t".join(cells))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after printing a one-line error."""
    return exit_code(lambda: _main(arguments))


if __name__ == "__main__":
    sys.exit(main())
