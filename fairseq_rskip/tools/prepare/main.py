"""``rskip prepare``: the command line, and from it to a ``Preparation``."""

import argparse
import filecmp
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq_rskip.console import Parser, between, print_line, whole_number
from fairseq_rskip.errors import RESUME, UserError, did_you_mean, exit_status
from fairseq_rskip.files import lock_holder, locked
from fairseq_rskip.machine import all_cores
from fairseq_rskip.tools.corpus import DATA, NAMES, SPLITS, folder_name
from fairseq_rskip.tools.prepare import stages
from fairseq_rskip.tools.prepare.archives import read_list
from fairseq_rskip.tools.prepare.languages import UNDETERMINED, language
from fairseq_rskip.tools.prepare.text import text_files
from fairseq_rskip.tools.process import CHECKOUT, stop_on_signals

FOLDER = CHECKOUT / "data-prep"  # has what is particular to published corpora
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
    """Raise ``UserError`` with a line for each file of your own text that does not exist."""
    names = ["text", *(f"{split}_{side}" for split in SPLITS for side in ("src", "tgt"))]
    missing = []
    for name in names:
        path = getattr(options, name, None)
        if path is not None and not path.exists():
            missing.append(f"--{name.replace('_', '-')}: {path} does not exist")
    if missing:
        raise UserError("\nerror: ".join(missing))


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


def plan(kind: Kind, options: argparse.Namespace) -> stages.Preparation:
    """What to prepare. Raises ``UserError``."""
    if kind.name == PAIRS:
        settings = _own_pairs(options)
    elif kind.name == TEXT:
        settings = _own_text(options)
    else:
        settings = _published(kind, options)
    if settings["src"] == settings["tgt"]:
        raise UserError(f"--src and --tgt are both {settings['src']}")
    if kind.is_own:
        settings["tokenizer"] = _own_tokenizer(options)
    elif options.bpe == SENTENCEPIECE:
        settings["tokenizer"] = "none"
    if options.normalise_punctuation and settings["tokenizer"] == "none":
        raise UserError(
            "--normalise-punctuation is done by Moses, and this text is not tokenised: "
            "expected --tokenizer moses, and --bpe subword-nmt or none"
        )
    if set(str(settings["out"])) & {",", ":"}:
        raise UserError(
            f"FOLDER {settings['out']}: fairseq splits paths at commas and colons; expected neither"
        )
    if settings["src"] == UNDETERMINED and settings["tokenizer"] == "moses":
        print_line("note: words are split by the rules for English; --lang changes it", "stderr")
    return stages.Preparation(
        **settings,
        bpe=options.bpe,
        bpe_size=options.bpe_size,
        joined=not options.separate,
        normalise_punctuation=options.normalise_punctuation,
        max_length=options.max_length,
        max_ratio=options.max_ratio,
        workers=options.workers,
        replace=options.replace,
    )


def _own_name(options: argparse.Namespace) -> str:
    """The name of a corpus of your own. Raises ``UserError`` for that of a published one."""
    name = options.name or folder_name(options.folder)
    if name in CORPORA:
        option = "--name" if options.name else "the folder's name,"
        raise UserError(f"{option} {name} is that of a published corpus: expected another --name")
    return name


def _own_tokenizer(options: argparse.Namespace) -> str:
    """Moses, or none before sentencepiece, which splits plain text. Raises ``UserError``."""
    if options.bpe != SENTENCEPIECE:
        return options.tokenizer or "moses"
    if options.tokenizer == "moses":
        raise UserError(
            "--tokenizer moses with --bpe sentencepiece, which splits text that is not tokenised: "
            "expected --tokenizer none, or another --bpe"
        )
    return "none"


def _own_pairs(options: argparse.Namespace) -> dict[str, Any]:
    files = {}
    for split in SPLITS:
        source, target = getattr(options, f"{split}_src"), getattr(options, f"{split}_tgt")
        has_text = source.is_file() and target.is_file() and source.stat().st_size > 0
        if has_text and filecmp.cmp(source, target, shallow=False):
            raise UserError(
                f"--{split}-src {source} and --{split}-tgt {target} have the same text: "
                f"expected {options.src} and {options.tgt}"
            )
        files[split] = (source, target)
    return {
        "corpus": _own_name(options),
        "out": options.folder.absolute(),
        "source": stages.Pairs(files),
        "src": options.src,
        "tgt": options.tgt,
    }


def _own_text(options: argparse.Namespace) -> dict[str, Any]:
    text_files(options.text)  # a folder without text is refused before anything is written
    return {
        "corpus": _own_name(options),
        "out": options.folder.absolute(),
        "source": stages.Documents(options.text, options.lines, options.held_out),
        "src": options.lang,
        "tgt": "",
    }


def _published(kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    corpus = kind.name if kind.name in NAMES else f"{kind.name}-en-{options.tgt}"
    listed = options.archives or FOLDER / "archives" / f"{corpus}.tsv"
    return {
        "corpus": corpus,
        "out": (options.folder or DATA / corpus).absolute(),
        "source": stages.Published(
            archives=read_list(listed, options.mirror),
            members=kind.values["unpack"],
            parts={split: kind.values[split] for split in SPLITS if split in kind.values},
            document_lines=kind.values.get("document-lines", 0),
            at_titles=kind.values.get("at-titles", False),
            held_out=kind.values.get("held-out", 0.0),
        ),
        "src": "en",
        "tgt": options.tgt,
        "tokenizer": kind.values["tokenizer"],
    }


def find_kind(argv: list[str]) -> tuple[Kind, list[str]]:
    """What the command line prepares, and the words that are left. Raises ``UserError``."""
    name, *words = argv
    if name.startswith("-"):
        return _kind_of_own_text(argv), argv
    if name in (PAIRS, TEXT):  # as prepare-corpus.sh and prepare-text.sh call them
        return Kind(name), words
    rows = _rows_of_corpora(name, words)
    if name in CORPORA and name.startswith("multi30k-en-"):
        return Kind("multi30k", [name.removeprefix("multi30k-en-")], rows["multi30k"]), words
    if name not in rows:
        hint = did_you_mean(name, CORPORA) or f"the corpora are {', '.join(CORPORA)}"
        raise UserError(
            f"no corpus named {name!r}; {hint}; your own text: rskip prepare {OWN_PAIRS}"
        )
    return Kind(name, rows[name]["tgt"], rows[name]), words


def _kind_of_own_text(argv: list[str]) -> Kind:
    """``TEXT`` or ``PAIRS``, by the options. Raises ``UserError``."""
    flags = {word.partition("=")[0] for word in argv}
    corpora = [word for word in argv if word in CORPORA]
    if corpora and not flags & {"--text", "--src", "--train-src"}:
        raise UserError(f"the corpus comes first: rskip prepare {corpora[0]} ...")
    parser = all_options()
    unknown = parser.unknown_options(argv)
    if unknown:
        parser.refuse(unknown, parser.option_strings)
    return Kind(TEXT if "--text" in flags else PAIRS)


def _rows_of_corpora(name: str, words: list[str]) -> dict[str, dict[str, Any]]:
    """The rows of corpora.yaml, one of which should be ``name``.

    Raises ``UserError`` without a checkout, and where ``name`` is a folder before the options of
    your own text.
    """
    of_own_text = [word for word in words if word.startswith(("--text", "--src", "--train-src"))]
    if of_own_text and name not in (*CORPORA, "multi30k"):
        raise UserError(
            f"{name} is no corpus, and a folder comes last: "
            f"rskip prepare {of_own_text[0]} ... {name}"
        )
    if not FOLDER.is_dir():
        raise UserError(
            f"there is no {FOLDER}: published corpora need a checkout of the project, as the "
            "current folder where the package is installed; "
            f"your own text: rskip prepare {OWN_PAIRS}"
        )
    import yaml

    return yaml.safe_load((FOLDER / "corpora.yaml").read_text("utf-8"))


def parse(argv: list[str]) -> tuple[Kind, argparse.Namespace]:
    """What is prepared, and the options. Raises ``UserError``."""
    if "" in argv:
        raise UserError("an empty argument; -h lists the options")
    kind, words = find_kind(argv)
    prog = sys.argv[0]
    if not prog.endswith(".sh"):
        prog = "rskip prepare" if kind.is_own else f"rskip prepare {argv[0]}"
    return kind, read(kind, words, prog)


def prepare(argv: list[str]) -> None:
    """Prepare the corpus named first, or your own text. Raises ``UserError``."""
    preparation = plan(*parse(argv))
    out = preparation.out
    stop_on_signals()
    with locked(out) as lock:
        if lock is None:
            raise UserError(f"another preparation of {out} is running ({lock_holder(out)})")
        stages.prepare(preparation)


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    if argv[:1] in ([], ["-h"], ["--help"]):
        all_options().print_help()
        return 0
    return exit_status(lambda: prepare(argv), RESUME)
