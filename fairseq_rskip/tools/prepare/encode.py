"""Clean, tokenise or split into subwords every line of some files, on all cores."""

import sys
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from fairseq_rskip.console import Parser, whole_number
from fairseq_rskip.errors import RESUME, exit_status
from fairseq_rskip.pretrained.text import clean, make_moses, make_sentencepiece, make_subword_nmt
from fairseq_rskip.tools import lines
from fairseq_rskip.tools.prepare import parallel


def make_clean() -> Callable[[str], str]:
    return clean


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True, metavar="clean|moses|subword-nmt|sentencepiece")
    steps.add_parser("clean", help="white space and invisible characters only")
    moses = steps.add_parser("moses", help="clean, and tokenise with sacremoses")
    moses.add_argument("--lang", required=True, help="language code, such as en")
    moses.add_argument("--normalise-punctuation", action="store_true", help="before it: quotes and dashes to ASCII")
    for name, model in (("subword-nmt", "codes of subword-nmt"), ("sentencepiece", "model of sentencepiece")):
        steps.add_parser(name, help=f"split with the {model}").add_argument("--model", type=Path, required=True)
    for step in steps.choices.values():
        step.add_argument("source", type=Path, metavar="FROM", help="folder to read from")
        step.add_argument("target", type=Path, metavar="TO", help="folder to write to")
        step.add_argument("names", nargs="+", metavar="NAME", help="files of FROM; those that TO has too are kept")
        step.add_argument("--workers", type=whole_number(1), default=parallel.all_cores(), help="processes (all cores)")
    options = parser.parse_args(argv)
    make, arguments = {
        "clean": lambda: (make_clean, ()),
        "moses": lambda: (make_moses, (options.lang, options.normalise_punctuation)),
        "subword-nmt": lambda: (make_subword_nmt, (options.model,)),
        "sentencepiece": lambda: (make_sentencepiece, (options.model,)),
    }[options.step]()
    names = [name for name in options.names if not (options.target / name).exists()]
    with parallel.mapper(make, arguments, options.workers) as mapped:
        for name in names:
            with (
                lines.writing(options.target / name) as output,
                tqdm(desc=name, unit=" lines", unit_scale=True, disable=None) as bar,
            ):
                for results in mapped(lines.read(options.source / name)):
                    output.writelines(result + "\n" for result in results)
                    bar.update(len(results))


if __name__ == "__main__":
    sys.exit(exit_status(main, RESUME))
