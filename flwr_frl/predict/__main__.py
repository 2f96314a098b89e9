"""Predict with the shared representation and a client's own head.

``python -m flwr_frl.predict FILES --checkpoint results/fedrep --client-name
pi-3 --state-dir /var/lib/flwr-frl/state`` combines the two. FILES are images, or text
files with one table row or text per line, depending on the task. ``--export
model.safetensors`` writes the model to one file; ``--model model.safetensors`` then
needs nothing else, except that a custom task also needs its package and ``--task``, and
a task that reads its classes from a folder needs ``--data-dir``. Code, folders and
addresses that only a file names are not used; name them with ``--task``,
``--algorithm``, ``--data-dir`` and ``--run-config``. ``--export model.pt2`` writes a
program for ``torch.export.load`` and ``--export model.onnx`` one for ONNX Runtime; with
images they map uint8 pixels (n, height, width, channels) to logits. Each output line
holds the file or line, its class and the probability, or the outputs if there are no
classes, separated by tabs; ``--csv FILE`` writes them to a table instead.
"""

import argparse
import csv
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from flwr_frl.common.command_line import Parser
from flwr_frl.common.files import write_atomically
from flwr_frl.common.settings import SettingsError
from flwr_frl.predict.export import export
from flwr_frl.predict.loading import load_model, load_run
from flwr_frl.predict.options import add_options, named_in
from flwr_frl.predict.predictor import files_in, predict
from flwr_frl.task.training import TrainingDivergedError


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m flwr_frl.predict",
        description=__doc__,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("files", nargs="*", type=Path, help="images, folders of images, or text files")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="a file that --export has written")
    source.add_argument(
        "--checkpoint", type=Path, help="the server's DIR/ALGORITHM, or the file in it"
    )
    add("--client-name", default="", help="as in the node config")
    add("--state-dir", default="", help="as in the node config")
    add("--data-dir", default="", help="the device's data, if it keeps no head")
    add_options(parser)
    add("--export", type=Path, help="write .safetensors, .pt2 or .onnx")
    add("--csv", type=Path, help="write the predictions to this file")
    options = parser.parse_args(arguments)
    if not options.files and options.export is None:
        raise SettingsError("there is nothing to do: give files or --export FILE")
    return options


def _write_csv(rows: Sequence[tuple[str, ...]], with_classes: bool, path: Path) -> None:
    text = io.StringIO()
    table = csv.writer(text)
    outputs = max((len(row) for row in rows), default=1) - 1
    numbered = [f"output-{i}" for i in range(1, outputs + 1)]
    table.writerow(["input", *(("class", "probability") if with_classes else numbered)])
    table.writerows(rows)
    try:
        # File names need not be valid Unicode.
        write_atomically(path, text.getvalue().encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise SettingsError(f"csv {str(path)!r}: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after printing a one-line error."""
    try:
        options = _parse(arguments)
        files, named = files_in(options.files), named_in(options)
        if options.model is not None:
            loaded = load_model(options.model, options.task, options.data_dir, named)
        else:
            loaded = load_run(
                options.checkpoint,
                options.client_name,
                options.state_dir,
                options.data_dir,
                options.task,
                algorithm=options.algorithm,
                named=named,
            )
        if options.export is not None:
            export(*loaded, options.export)
        rows = predict(*loaded, files)
        if options.csv is not None:
            _write_csv(list(rows), bool(loaded[1].classes), options.csv)
        else:
            for cells in rows:
                # File names need not be valid Unicode.
                line = "\t".join(cells).encode("utf-8", "surrogateescape")
                print(line.decode("utf-8", "backslashreplace"))
            sys.stdout.flush()
    except (SettingsError, TrainingDivergedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # A reader such as `head` has closed the pipe. Without the redirection, flushing
        # the remaining output at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
