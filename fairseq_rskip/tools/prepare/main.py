"""``rskip prepare``: from the command line to a ``Preparation``, which is carried out."""

import argparse
import filecmp
import sys
from pathlib import Path
from typing import Any

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import RESUME, UserError, did_you_mean, exit_status
from fairseq_rskip.files import lock_holder, locked
from fairseq_rskip.tools.corpus import DATA, NAMES, SPLITS, folder_name
from fairseq_rskip.tools.prepare import sources, stages
from fairseq_rskip.tools.prepare.archives import read_list
from fairseq_rskip.tools.prepare.languages import UNDETERMINED
from fairseq_rskip.tools.prepare.options import (
    CORPORA,
    OWN_PAIRS,
    PAIRS,
    SENTENCEPIECE,
    TEXT,
    Kind,
    all_options,
    read,
)
from fairseq_rskip.tools.prepare.text import text_files
from fairseq_rskip.tools.process import CHECKOUT, stop_on_signals

FOLDER = CHECKOUT / "data-prep"  # has what is particular to published corpora


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
    _check_folder(settings["out"])
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


def _check_folder(out: Path) -> None:
    """Raise ``UserError`` for a path that fairseq or preparation.json cannot have."""
    if set(str(out)) & {",", ":"}:
        raise UserError(
            f"FOLDER {out}: fairseq splits paths at commas and colons; expected neither"
        )
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise UserError(f"FOLDER {str(out)!a}: expected a name in UTF-8") from None


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
        "source": sources.Pairs(files),
        "src": options.src,
        "tgt": options.tgt,
    }


def _own_text(options: argparse.Namespace) -> dict[str, Any]:
    text_files(options.text)  # a folder without text is refused before anything is written
    out = options.folder.absolute()
    if options.text.is_dir() and out.is_relative_to(options.text):
        raise UserError(
            f"FOLDER {out} is in --text {options.text}, every *.txt file of which is text: "
            "expected a FOLDER outside of it"
        )
    return {
        "corpus": _own_name(options),
        "out": out,
        "source": sources.Documents(options.text, options.lines, options.held_out),
        "src": options.lang,
        "tgt": "",
    }


def _published(kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    corpus = kind.name if kind.name in NAMES else f"{kind.name}-en-{options.tgt}"
    listed = options.archives or FOLDER / "archives" / f"{corpus}.tsv"
    return {
        "corpus": corpus,
        "out": (options.folder or DATA / corpus).absolute(),
        "source": sources.Published(
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
