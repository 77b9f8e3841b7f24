"""Translate standard input to standard output, line by line.

    rskip translate checkpoints/a < text.en > text.de
    rskip translate exported-model < text.en
    rskip translate multi30k-en-de-2rskip < text.en

MODEL is the name of a model that comes with the package (docs/share.md), a folder that rskip export
wrote, a checkpoint, or a folder of checkpoints (or of a run: RUN/seed1), of which the last five are
averaged as by rskip evaluate. Lines keep their order; an empty line stays empty.
"""

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.evaluate.main import add_search

BATCH = 64  # lines that are translated together


def load(path: Path, data: Path | None) -> Any:
    """The translator in an exported folder or, by the same conversion, of checkpoints.

    Raises ``UserError``.
    """
    from fairseq_rskip.pretrained import from_pretrained, read_config
    from fairseq_rskip.tools.saved_model import EXPORT, TEXT, find_saved

    saved = find_saved(path)
    if saved.kind == TEXT:
        return _converted(saved, data)
    kind = read_config(saved.paths[0])["kind"] if saved.kind == EXPORT else saved.kind
    if kind != "translation":
        raise UserError(f"{path} is a model of the kind {kind}: expected translation")
    return from_pretrained(saved.paths[0])


def _converted(saved: Any, data: Path | None) -> Any:
    """The translator of the checkpoints ``saved``. Raises ``UserError``."""
    from fairseq_rskip.pretrained.translation import Translator, make_task
    from fairseq_rskip.tools.evaluate.weights import as_one, task_of
    from fairseq_rskip.tools.export.translation import convert

    if saved.which:
        print_line(saved.which, "stderr")
    task_of(saved.paths[0], "translation")  # an unusable checkpoint ends in one line here
    with as_one(saved.paths) as checkpoint, tempfile.TemporaryDirectory() as stage_name:
        stage = Path(stage_name)
        config, model, _ = convert(stage, checkpoint, data, saved.paths[0].parent)
        task = make_task(stage, (config["source"], config["target"]), config["model"])
        return Translator(config, stage, task, model.eval())


def read_batches(size: int) -> Iterator[list[str]]:
    """Lines of standard input, ``size`` at a time.

    Raises ``UserError`` for a line that is not UTF-8, after the lines before it.
    """
    batch: list[str] = []
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            batch.append(line.decode("utf-8").rstrip("\r\n"))
        except UnicodeDecodeError:
            if batch:
                yield batch
            raise UserError(f"line {number} of standard input is not valid UTF-8") from None
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def main(argv: list[str] | None = None) -> None:
    """Write a line for each line that is read. Raises ``UserError``."""
    parser = Parser(description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("text", nargs="?", help=argparse.SUPPRESS)  # for a clear refusal
    parser.add_argument(
        "--data", type=Path, help="prepared corpus of a checkpoint (the one it was trained on)"
    )
    add_search(parser)
    options = parser.parse_args(argv)
    if options.text is not None:
        raise UserError(
            f"{options.text}: expected the sentences on standard input, "
            f"rskip translate {options.model} < {options.text}"
        )
    if sys.stdin is None:
        raise UserError("the standard input is closed: expected sentences, one on each line")
    import torch  # takes seconds: after the options

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # as the input, whatever the locale

    with contextlib.redirect_stdout(sys.stderr):
        model = load(options.model, options.data)
    model.to("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    for lines in read_batches(1 if sys.stdin.isatty() else BATCH):
        for text in model.translate(lines, beam=options.beam, lenpen=options.lenpen):
            print(text)
        sys.stdout.flush()
