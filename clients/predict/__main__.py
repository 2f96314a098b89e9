"""Predict with the shared representation and a client's own head.

``python -m flwr_frl.clients.predict FILES --checkpoint results/fedrep --client-name
pi-3
--state-dir /var/lib/flwr-frl/state`` puts the two together. FILES are images, or have a
row of a table or a text in each line, as the task reads them. ``--export
model.safetensors`` writes the model to one file, with which ``--model
model.safetensors`` needs nothing else; a custom task also needs its package and
``--task``, and one that reads its classes from a folder ``--data-dir``. Code, folders
and addresses that only a file names are not used: ``--task``, ``--algorithm``,
``--data-dir`` and ``--run-config`` name them. ``--export model.pt2`` writes a program
for ``torch.export.load``, and ``--export model.onnx`` one for ONNX Runtime, for images
from uint8 pixels (n, height, width, channels) to logits. A line of
output has the image or the line, its class and the probability, or the outputs where
there are no classes, with tabs between them; ``--csv FILE`` writes them to a table.
"""

import argparse
import csv
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flwr_frl.clients.device.task_card import TaskCard
from flwr_frl.clients.predict.export import export
from flwr_frl.clients.predict.lines import predict
from flwr_frl.clients.predict.loading import Loaded, classify, load_model, load_run
from flwr_frl.clients.predict.naming import name_settings, named_in
from flwr_frl.clients.predict.predictor import files_in
from flwr_frl.task.command_line import Parser
from flwr_frl.task.files import write_atomically
from flwr_frl.task.settings import SettingsError
from flwr_frl.task.sgd import TrainingDivergedError


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m flwr_frl.clients.predict",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument(
        "files", nargs="*", type=Path, help="images, folders of them, and other files"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="a file that --export has written")
    source.add_argument(
        "--checkpoint", type=Path, help="the server's DIR/ALGORITHM, or the file in it"
    )
    parser.add_argument("--client-name", default="", help="as in the node config")
    parser.add_argument("--state-dir", default="", help="as in the node config")
    parser.add_argument(
        "--data-dir", default="", help="the device's data, if it keeps no head"
    )
    name_settings(parser)
    parser.add_argument("--export", type=Path, help="write .safetensors, .pt2 or .onnx")
    parser.add_argument("--csv", type=Path, help="write the predictions to this file")
    options = parser.parse_args(arguments)
    if not options.files and options.export is None:
        raise SettingsError("there is nothing to do: give files or --export FILE")
    return options


def _predictions(loaded: Loaded, files: Sequence[Path]) -> Iterator[tuple[str, ...]]:
    if isinstance(loaded[1], TaskCard):
        yield from predict(*loaded, files)
    else:
        for path, name, probability in classify(*loaded, files):
            yield str(path), name, f"{probability:.4f}"


def _write_csv(rows: Sequence[tuple[str, ...]], with_classes: bool, path: Path) -> None:
    """Write predictions as a table, wholly or not at all."""
    text = io.StringIO()
    table = csv.writer(text)
    outputs = max((len(row) for row in rows), default=1) - 1
    numbered = [f"output-{i}" for i in range(1, outputs + 1)]
    table.writerow(["input", *(("class", "probability") if with_classes else numbered)])
    table.writerows(rows)
    try:
        # A file's name need not be text.
        write_atomically(path, text.getvalue().encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise SettingsError(f"csv {str(path)!r}: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 after one line that says what is wrong."""
    try:
        options: Any = _parse(arguments)
        files = files_in(options.files)
        if options.model is not None:
            loaded = load_model(
                options.model, options.task, options.data_dir, named_in(options)
            )
        else:
            loaded = load_run(
                options.checkpoint,
                options.client_name,
                options.state_dir,
                options.data_dir,
                options.task,
                algorithm=options.algorithm,
                named=named_in(options),
            )
        if options.export is not None:
            model, card = loaded
            export(model, card, options.export)
        rows = _predictions(loaded, files)
        if options.csv is not None:
            _write_csv(list(rows), bool(loaded[1].classes), options.csv)
        else:
            for cells in rows:
                # A file's name need not be text.
                line = "\t".join(cells).encode("utf-8", "surrogateescape")
                print(line.decode("utf-8", "backslashreplace"))
            sys.stdout.flush()
    except (SettingsError, TrainingDivergedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever reads has enough, as `head` does; what is still in the buffer would
        # fail again when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
