"""The steps of data-prep/common.sh: ``python -m fairseq_rskip.tools.prepare STEP``; no torch, no fairseq."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_rskip.console import Parser, finite, whole_number
from fairseq_rskip.errors import RESUME, exit_status
from fairseq_rskip.tools.prepare import subwords, text


def run(argv: list[str] | None = None) -> None:
    """Do a step: a function whose arguments are named as the options are. Raises ``UserError``."""
    parser = Parser(prog="python -m fairseq_rskip.tools.prepare", description=__doc__)
    steps = parser.add_subparsers(required=True)

    def step(name: str, function: Callable[..., None], about: str) -> Callable[..., Any]:
        command = steps.add_parser(name, help=about)
        command.set_defaults(function=function)
        return command.add_argument

    add = step("collect", text.collect, "join published parts into PREFIX.SRC and PREFIX.TGT")
    add("prefix")
    add("--src", required=True)
    add("--tgt", required=True)
    add("--files", nargs=2, action="append", default=[], metavar=("SOURCE", "TARGET"))
    add("parts", nargs="*", help="PART.LANG, PART.LANG.gz or PART-src.LANG.sgm (-ref) exist")
    for name in text.ENCODERS:
        add = step(name, partial(text.encode, name), "encode files of the folder FROM")
        add("source", type=Path, metavar="FROM")
        add("target", type=Path, metavar="TO")
        add("names", nargs="+", metavar="NAME", help="files of FROM; those that TO has too are kept")
        add("--workers", type=whole_number(1), default=text.all_cores(), help="processes (all cores)")
        add("--lang", required=name == "moses", help="language code, such as en")
        add("--normalise-punctuation", action="store_true", help="quotes and dashes to ASCII first")
        add("--model", type=Path, required=name in subwords.LEARNERS, help="of the subwords")
    add = step("learn", subwords.learn, "learn subwords from training text")
    add("kind", choices=list(subwords.LEARNERS))
    add("--size", type=whole_number(1), required=True, help="merges, or sentencepiece's vocabulary")
    add("--model", type=Path, required=True, help="file to write")
    add("texts", nargs="+", type=Path)
    add = step("filter", text.filter_pairs, "drop training pairs of impossible lengths")
    add("sources", nargs=2, type=Path)
    add("targets", nargs=2, type=Path)
    add("--max-length", type=whole_number(1), default=250, help="subwords")
    add("--max-ratio", type=finite, default=1.5, help="of one length to the other, either way")
    add = step("documents", text.draw_documents, "a text's documents, with a blank line behind each")
    add("source", type=Path, help="a text file, or a folder of them")
    add("targets", nargs="+", type=Path, help="files to write; all but the first get --held-out")
    add("--held-out", type=finite, default=0.0, help="share of the documents")
    add("--lines", type=whole_number(0), default=0, dest="length", help="a document is so many lines")
    add("--titles", action="store_true", help="a document begins with a title of WikiText")
    add = step("describe", text.describe, "write DATA-BIN/preparation.json")
    add("data_bin", type=Path)
    add("facts", help="what else it says, as JSON")
    options = vars(parser.parse_args(argv))
    options.pop("function")(**options)


if __name__ == "__main__":
    sys.exit(exit_status(run, RESUME))
