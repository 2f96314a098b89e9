"""Predict with the shared representation and a client's own head.

``python -m flwr_frl.predict FILES --checkpoint results/fedrep --client-name
pi-3 --state-dir /var/lib/flwr-frl/state`` combines the two. FILES are images, or text
files with one table row or text per line, depending on the task. ``--export
model.safetensors`` writes the model to one file; ``--model model.safetensors`` then
needs nothing else, except that a custom task also needs its package and ``--task``, and
a task that reads its classes from a folder needs ``--data-dir``. Code, folders and
addresses that only a file names are not used; name them with ``--task``,
``--algorithm``, ``--data-dir`` and ``--run-config``. Each output line holds the file or
line, its class and the probability, or the outputs if there are no classes, separated
by tabs.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from flwr_frl.common.command_line import Parser, exit_code, run_config
from flwr_frl.common.settings import require
from flwr_frl.predict.file_settings import FLAGS
from flwr_frl.predict.predictor import load_model
from flwr_frl.predict.runs import load_run


def parser_of(name: str, description: str | None) -> Parser:
    """Return a parser with the options that both commands have."""
    parser = Parser(prog=f"python -m {name}", description=description)
    add = parser.add_argument
    add("--checkpoint", default="", help="the server's DIR/ALGORITHM")
    add("--client-name", default="", help="as in the node config")
    add("--state-dir", default="", help="as in the node config")
    add("--data-dir", default="", help="the client's data")
    add("--task", default="", help="task, if it is custom or downloads its data")
    add("--algorithm", default="", help="algorithm, if it is package.module:Class")
    add(
        "--run-config",
        nargs="*",
        action="extend",
        default=[],
        metavar="'k=v ...'",
        help="other settings that a file alone cannot set, such as weights",
    )
    return parser


def named_in(options: Namespace) -> dict[str, Any]:
    """Return the settings that options name; `SettingsError` if they are malformed."""
    named = run_config(options.run_config)
    flags = {name: getattr(options, name.replace("-", "_")) for name in FLAGS}
    return {**named, **{name: text for name, text in flags.items() if text}}


def _main(arguments: Sequence[str]) -> int:
    parser = parser_of("flwr_frl.predict", __doc__)
    add = parser.add_argument
    add("files", nargs="*", help="images, folders of images, or text files")
    add("--model", help="a file that --export has written, in place of --checkpoint")
    add("--export", help="write the model to this .safetensors file")
    options = parser.parse_args(arguments)
    something = bool(options.files or options.export)
    require(something, "files", options.files, "one or more, or --export FILE")
    named = named_in(options)
    if options.model:
        predictor = load_model(options.model, **named)
    else:
        where = {"path": options.checkpoint, "client": options.client_name}
        predictor = load_run(**{**named, **where, "state_dir": options.state_dir})
    if options.export:
        predictor.export(options.export)
    for cells in predictor.rows(options.files):
        print("\t".join(cells))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after printing a one-line error."""
    return exit_code(lambda: _main(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    sys.exit(main())
