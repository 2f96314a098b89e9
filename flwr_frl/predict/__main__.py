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

from flwr_frl.common.settings import SettingsError
from flwr_frl.predict.command_line import (
    Arguments,
    exit_code,
    named_in,
    parser_of,
    show,
)
from flwr_frl.predict.loading import load_model, load_run


def _predict(arguments: Arguments) -> None:
    parser = parser_of("python -m flwr_frl.predict", __doc__)
    add = parser.add_argument
    add("files", nargs="*", help="images, folders of images, or text files")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="a file that --export has written")
    source.add_argument("--checkpoint", help="the server's DIR/ALGORITHM")
    add("--export", help="write the model to this .safetensors file")
    options = parser.parse_args(arguments)
    if not options.files and not options.export:
        line = "there is nothing to do: give files or --export FILE"
        raise SettingsError(line, "command-line")
    named = named_in(options)
    if options.model:
        predictor = load_model(options.model, **named)
    else:
        where = {"path": options.checkpoint, "client": options.client_name}
        predictor = load_run(**{**named, **where, "state_dir": options.state_dir})
    if options.export:
        predictor.export(options.export)
    for cells in predictor.rows(options.files):
        show("\t".join(cells))


def main(arguments: Arguments = None) -> int:
    """Run the command; return 0, or 2 after printing a one-line error."""
    return exit_code(_predict, arguments)


if __name__ == "__main__":
    sys.exit(main())
