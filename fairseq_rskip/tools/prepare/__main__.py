"""The steps of data-prep/common.sh: ``python -m fairseq_rskip.tools.prepare STEP``; no torch, no fairseq."""

import argparse
import sys
from pathlib import Path

from fairseq_rskip.console import Parser, finite, whole_number
from fairseq_rskip.errors import RESUME, exit_status
from fairseq_rskip.pretrained import text as encoders
from fairseq_rskip.tools.prepare import subwords, text
from fairseq_rskip.tools.prepare.describe import describe
from fairseq_rskip.tools.prepare.parallel import all_cores


def read(argv: list[str] | None = None) -> argparse.Namespace:
    """The step and its options."""
    parser = Parser(prog="python -m fairseq_rskip.tools.prepare", description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    collect = steps.add_parser("collect", help="join published parts into PREFIX.SRC and PREFIX.TGT")
    collect.add_argument("prefix")
    collect.add_argument("--src", required=True)
    collect.add_argument("--tgt", required=True)
    collect.add_argument("--files", nargs=2, action="append", default=[], metavar=("SOURCE", "TARGET"))
    collect.add_argument("parts", nargs="*", help="PART.LANG, PART.LANG.gz or PART-src.LANG.sgm (-ref) exist")
    for name in ("clean", "moses", "subword-nmt", "sentencepiece"):
        encode = steps.add_parser(name, help="encode files of the folder FROM")
        encode.add_argument("source", type=Path, metavar="FROM")
        encode.add_argument("target", type=Path, metavar="TO")
        encode.add_argument("names", nargs="+", metavar="NAME", help="files of FROM; those that TO has too are kept")
        encode.add_argument("--workers", type=whole_number(1), default=all_cores(), help="processes (all cores)")
        encode.add_argument("--lang", required=name == "moses", help="language code, such as en")
        encode.add_argument("--normalise-punctuation", action="store_true", help="quotes and dashes to ASCII first")
        encode.add_argument("--model", type=Path, required=name in encoders.POST_PROCESS, help="of the subwords")
    learn = steps.add_parser("learn", help="learn subwords from training text")
    learn.add_argument("kind", choices=["subword-nmt", "sentencepiece"])
    learn.add_argument("--size", type=whole_number(1), required=True, help="merges, or sentencepiece's vocabulary")
    learn.add_argument("--model", type=Path, required=True, help="file to write")
    learn.add_argument("texts", nargs="+", type=Path)
    filter_ = steps.add_parser("filter", help="drop training pairs of impossible lengths")
    filter_.add_argument("sources", nargs=2, type=Path)
    filter_.add_argument("targets", nargs=2, type=Path)
    filter_.add_argument("--max-length", type=whole_number(1), default=250, help="subwords")
    filter_.add_argument("--max-ratio", type=finite, default=1.5, help="of one length to the other, either way")
    documents = steps.add_parser("documents", help="a text's documents, with a blank line behind each")
    documents.add_argument("source", type=Path, help="a text file, or a folder of them")
    documents.add_argument("targets", nargs="+", type=Path, help="files to write; all but the first get --held-out")
    documents.add_argument("--held-out", type=finite, default=0.0, help="share of the documents")
    documents.add_argument("--lines", type=whole_number(0), default=0, help="a document is so many lines")
    documents.add_argument("--titles", action="store_true", help="a document begins with a title of WikiText")
    about = steps.add_parser("describe", help="write DATA-BIN/preparation.json")
    about.add_argument("data_bin", type=Path)
    about.add_argument("facts", help="what else it says, as JSON")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> None:
    """Do the step. Raises ``UserError``."""
    if options.step == "collect":
        languages = {"src": options.src, "ref": options.tgt}
        pairs = [[text.find_part(part, lang, role) for role, lang in languages.items()] for part in options.parts]
        text.collect([Path(f"{options.prefix}.{lang}") for lang in languages.values()], [*options.files, *pairs])
    elif options.step == "learn":
        learners = {"subword-nmt": subwords.learn_subword_nmt, "sentencepiece": subwords.learn_sentencepiece}
        learners[options.kind](options.texts, options.model, options.size)
    elif options.step == "filter":
        text.filter_pairs(options.sources, options.targets, options.max_length, options.max_ratio)
    elif options.step == "documents":
        text.draw_documents(options.source, options.targets, options.held_out, options.lines, options.titles)
    elif options.step == "describe":
        describe(options.data_bin, options.facts)
    else:
        make, arguments = {
            "clean": (text.make_clean, ()),
            "moses": (encoders.make_moses, (options.lang, options.normalise_punctuation)),
            "subword-nmt": (encoders.make_subword_nmt, (options.model,)),
            "sentencepiece": (encoders.make_sentencepiece, (options.model,)),
        }[options.step]
        text.encode(make, arguments, options.source, options.target, options.names, options.workers)


def main(argv: list[str] | None = None) -> int:
    """Exit status of one step."""
    return exit_status(lambda: run(read(argv)), RESUME)


if __name__ == "__main__":
    sys.exit(main())
