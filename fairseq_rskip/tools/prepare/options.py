"""The options of ``rskip prepare``, of each kind of text."""

import argparse
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq_rskip.console import Parser, between, whole_number
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import why_no_file
from fairseq_rskip.machine import all_cores
from fairseq_rskip.tools.corpus import NAMES, SPLITS
from fairseq_rskip.tools.prepare.languages import UNDETERMINED, language

PAIRS, TEXT = "corpus", "text"  # your own text in two languages, or in one
SUBWORD_NMT, SENTENCEPIECE = "subword-nmt", "sentencepiece"
BPE = (SUBWORD_NMT, SENTENCEPIECE, "none")
CORPORA = [name for name in NAMES if name != "numbers"]
OWN_PAIRS = "--src en --tgt de --train-src FILE --train-tgt FILE ... FOLDER"
USAGE = f"""rskip prepare CORPUS [option ...] [FOLDER]
       rskip prepare {OWN_PAIRS}
       rskip prepare --text FILE-or-FOLDER [--lang en] [option ...] FOLDER"""
ABOUT = f"""Make FOLDER/data-bin, which training and evaluation take, from a published corpus or
from your own text. CORPUS is {", ".join(CORPORA)};
FOLDER is data/CORPUS below the current folder by default."""
ABOUT_PAIRS = "Prepare your own parallel text (UTF-8, one sentence a line) for fairseq."
ABOUT_TEXT = "Prepare your own text (UTF-8) for a language model, split by documents."
ABOUT_PUBLISHED = (
    "Download a published corpus and prepare it for fairseq; FOLDER is data/CORPUS by default."
)
RESUMES = (
    "Each stage runs once: after an interruption or an error the same command resumes where it "
    "stopped."
)


@dataclass(frozen=True)
class Kind:
    """What is prepared: ``PAIRS``, ``TEXT``, or a row of corpora.yaml by name, with its values."""

    name: str
    targets: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Whether it is your own text."""
        return self.name in (PAIRS, TEXT)

    @property
    def has_pairs(self) -> bool:
        """Whether it has two languages."""
        return self.name == PAIRS or any(self.targets)


def absolute(text: str) -> Path:
    """A type for argparse: the absolute path of a file or folder of your own text."""
    return Path(os.path.abspath(text))


def check_existing(options: argparse.Namespace) -> None:
    """Raise ``UserError`` with a line for each file of your own text that is none.

    Files are read twice, so a pipe will not do; ``--text`` may be a folder.
    """
    names = ["text", *(f"{split}_{side}" for split in SPLITS for side in ("src", "tgt"))]
    problems = []
    for name in names:
        path = getattr(options, name, None)
        if path is None or (name == "text" and path.is_dir()):
            continue
        problem = why_no_file(path)
        if problem:
            problems.append(f"--{name.replace('_', '-')}: {path} {problem}")
    if problems:
        raise UserError("\nerror: ".join(problems))


def add_published(group: Any) -> None:
    """Add where a published corpus's archives come from."""
    group.add_argument(
        "--from",
        dest="mirror",
        default="",
        metavar="DIR-or-URL",
        help="take the archives from a folder or a mirror",
    )
    group.add_argument(
        "--archives",
        type=Path,
        metavar="FILE",
        help="use this list, not data-prep/archives/CORPUS.tsv",
    )


def add_own_pairs(group: Any) -> None:
    """Add your own parallel text."""
    code = {"type": language, "required": True, "metavar": "LANG"}
    group.add_argument("--src", **code, help="language code of the source, such as en")
    group.add_argument("--tgt", **code, help="language code of the target")
    for split in SPLITS:
        for side in ("src", "tgt"):
            group.add_argument(
                f"--{split}-{side}",
                type=absolute,
                required=True,
                metavar="FILE",
                help=f"{split} text, may be gzipped",
            )


def add_own_text(group: Any) -> None:
    """Add your own text in one language."""
    group.add_argument(
        "--text",
        type=absolute,
        required=True,
        metavar="PATH",
        help="a text file, maybe gzipped, with blank lines between documents; "
        "or a folder of *.txt documents",
    )
    group.add_argument(
        "--lang",
        type=language,
        default=UNDETERMINED,
        metavar="LANG",
        help="language code of the text, such as cs (default: und, for undetermined)",
    )
    group.add_argument(
        "--lines", type=whole_number(1), default=0, metavar="N", help="a document has N lines"
    )
    group.add_argument(
        "--held-out",
        type=between(0, 0.5),
        default=0.05,
        metavar="P",
        help="share of the documents for validation, and for the test (0.05)",
    )


def add_own(group: Any) -> None:
    """Add what both kinds of your own text have."""
    group.add_argument(
        "--tokenizer",
        choices=["moses", "none"],
        help="none: the text is tokenised already (moses; with sentencepiece none)",
    )
    group.add_argument("--name", default="", help="name of the corpus (default: FOLDER's name)")


def add_subwords(group: Any, bpe: str, size: int | None) -> None:
    """Add what all texts have; ``bpe`` and ``size`` are the defaults, None follows the corpus."""
    group.add_argument("--bpe", choices=BPE, default=bpe, help=f"kind of subwords ({bpe})")
    group.add_argument(
        "--bpe-size",
        type=whole_number(1),
        default=size,
        metavar="N",
        help=f"merges, or sentencepiece's vocabulary ({size or 'by the size of the corpus'})",
    )
    group.add_argument(
        "--normalise-punctuation",
        action="store_true",
        help="make quotes and dashes ASCII first",
    )
    group.add_argument(
        "--replace",
        action="store_true",
        help="make FOLDER/data-bin again where it was made from other text or options",
    )
    group.add_argument(
        "--workers",
        type=whole_number(1),
        default=all_cores(),
        metavar="N",
        help="number of processes (all cores)",
    )


def add_pairs(group: Any) -> None:
    """Add what all texts in two languages have."""
    group.add_argument("--separate", action="store_true", help="subwords for each language")
    group.add_argument(
        "--max-length",
        type=whole_number(1),
        default=250,
        metavar="N",
        help="longest training sentence in subwords (250)",
    )
    group.add_argument(
        "--max-ratio",
        type=between(1, math.inf),
        default=1.5,
        metavar="X",
        help="drop training pairs above this ratio of lengths (1.5)",
    )


def all_options() -> Parser:
    """Every form of the command at once."""
    parser = Parser(prog="rskip prepare", usage=USAGE, description=ABOUT, epilog=RESUMES)
    add_subwords(
        parser.add_argument_group("all", "With --text, --bpe is sentencepiece by default."),
        SUBWORD_NMT,
        None,
    )
    add_pairs(parser.add_argument_group("two languages"))
    add_published(parser.add_argument_group("a published corpus"))
    add_own_pairs(parser.add_argument_group("your own text in two languages"))
    add_own_text(parser.add_argument_group("your own text in one language"))
    add_own(parser.add_argument_group("your own text"))
    return parser


def read(kind: Kind, words: list[str], prog: str) -> argparse.Namespace:
    """The options ``words`` for ``kind``. Raises ``UserError``."""
    about = {PAIRS: ABOUT_PAIRS, TEXT: ABOUT_TEXT}.get(kind.name, ABOUT_PUBLISHED)
    parser = Parser(prog=prog, description=about, epilog=RESUMES)
    parser.add_argument(
        "folder",
        nargs=None if kind.is_own else "?",
        metavar="FOLDER",
        type=Path,
        help="write FOLDER/data-bin",
    )
    if kind.name == PAIRS:
        add_own_pairs(parser)
    if kind.name == TEXT:
        add_own_text(parser)
    if kind.is_own:
        add_own(parser)
    else:
        add_published(parser)
    if len(kind.targets) > 1:
        parser.add_argument(
            "--tgt",
            choices=kind.targets,
            default=kind.targets[0],
            metavar="LANG",
            help=f"{' or '.join(kind.targets)} ({kind.targets[0]})",
        )
    elif kind.targets:
        parser.set_defaults(tgt=kind.targets[0])
    bpe = SENTENCEPIECE if kind.name == TEXT else SUBWORD_NMT
    add_subwords(parser, kind.values.get("bpe", bpe), kind.values.get("bpe-size"))
    if kind.has_pairs:
        add_pairs(parser)
    else:
        parser.set_defaults(separate=False, max_length=0, max_ratio=0.0)
    options = parser.parse_args(words)
    check_existing(options)
    return options
