"""``rskip prepare``, and the options of data-prep/prepare-*.sh, which it runs."""

import argparse
import itertools
import math
import os
import re
import shlex
import sys
from pathlib import Path

from fairseq_rskip.console import Parser, between, whole_number
from fairseq_rskip.errors import UserError, did_you_mean, exit_status
from fairseq_rskip.tools.corpus import NAMES, ROOT
from fairseq_rskip.tools.prepare.text import text_files

BPE_SIZES = {"prepare-multi30k.sh": 6000, "prepare-wmt14-en-de.sh": 37000}  # merges; the paper's for WMT; else 32,000
BPE_SIZES["prepare-text.sh"] = 8000
BPE = {"prepare-text.sh": "sentencepiece", "prepare-wikitext103.sh": "none"}  # of a language model; else subword-nmt
SPLITS = ("train", "valid", "test")
SCRIPTS = {name: [f"prepare-{name}.sh"] for name in NAMES if name[:3] in ("iws", "wmt", "wik")}
SCRIPTS |= {f"multi30k-en-{lang}": ["prepare-multi30k.sh", "--tgt", lang] for lang in ("de", "fr")}
RESUMES = "Each stage runs once: after an interruption or an error the same command resumes where it stopped."


def language(text: str) -> str:
    """A type for argparse: a language code."""
    if not re.fullmatch("[A-Za-z_]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a language code such as en")
    return text


def text_file(text: str) -> str:
    """A type for argparse: the absolute path of a file."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"no file {text}")
    return os.path.abspath(text)


def path(text: str) -> str:
    """A type for argparse: the absolute path of a file or folder."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"no file or folder {text}")
    return os.path.abspath(text)


def read(script: str, words: list[str]) -> argparse.Namespace:
    """The options ``words`` of ``script``, the name of a file in data-prep."""
    own, text = script == "prepare-corpus.sh", script == "prepare-text.sh"
    fetches, pairs = not (own or text), script not in BPE
    description = DESCRIPTIONS.get(script, PUBLISHED)
    parser = Parser(prog=os.environ.get("RSKIP_PROG", f"data-prep/{script}"), description=description, epilog=RESUMES)
    add = parser.add_argument
    add("folder", nargs="?" if fetches else None, default="", help="FOLDER/data-bin is what training takes")
    if text:
        source = "a text file with blank lines between documents, gzip too, or a folder whose *.txt files are documents"
        add("--text", type=path, required=True, dest="input", metavar="PATH", help=source)
        add("--lines", type=whole_number(1), default=0, metavar="N", help="a document is N lines")
        share = "share of the documents for validation, and for the test (%(default)s)"
        add("--held-out", type=between(0, 0.5), default=0.05, metavar="P", help=share)
    if own or text:
        name, default = ("--src", {"required": True}) if own else ("--lang", {"default": "en"})
        add(name, type=language, dest="src", metavar="LANG", help="language code, such as en", **default)
        add("--tokenizer", choices=["moses", "none"], default="moses", help="none: the text is tokenised already")
        add("--name", default="", help="what the corpus is called (default: FOLDER's name)")
    if own:
        for split, side in itertools.product(SPLITS, ("src", "tgt")):
            add(f"--{split}-{side}", type=text_file, required=True, metavar="FILE", help=f"{split} text, gzip too")
    if own or "multi30k" in script:
        add("--tgt", type=language, required=own, choices=None if own else ["de", "fr"], default="de", metavar="LANG")
    if fetches:
        add("--from", default="", metavar="DIR-or-URL", help="take the archives from a folder or a mirror")
        add("--archives", default="", metavar="FILE", help="another list of archives than data-prep/archives has")
    kind = add("--bpe", choices=["subword-nmt", "sentencepiece", "none"], default=BPE.get(script, "subword-nmt"))
    kind.help = "kind of subwords (%(default)s)"
    size = add("--bpe-size", type=whole_number(1), default=BPE_SIZES.get(script, 32000), metavar="N")
    size.help = "merge operations, or sentencepiece's vocabulary (%(default)s)"
    add("--normalise-punctuation", dest="normalise", action="store_true", help="quotes and dashes to ASCII first")
    parser.set_defaults(vocabulary="joint")
    if pairs:
        add("--joint", dest="vocabulary", action="store_const", const="joint", help=argparse.SUPPRESS)
        add("--separate", dest="vocabulary", action="store_const", const="separate", help="subwords for each language")
        longest = "longest training sentence in subwords (%(default)s)"
        add("--max-length", type=whole_number(1), default=250, help=longest)
        most = "drop training pairs above this ratio of lengths (%(default)s)"
        add("--max-ratio", type=between(1, math.inf), default=1.5, help=most)
    else:
        parser.set_defaults(max_length=0, max_ratio=0)
    add("--workers", type=whole_number(1), metavar="N", help="processes (all cores)")
    return parser.parse_args(words)


USAGE = f"""usage: rskip prepare CORPUS [option ...] [FOLDER]
       rskip prepare --src en --tgt de --train-src FILE --train-tgt FILE ... FOLDER
       rskip prepare --text FILE-or-FOLDER [option ...] FOLDER

Make FOLDER/data-bin, which training and evaluation take, from a published corpus or from your own text.

  CORPUS  {", ".join(SCRIPTS)}

rskip prepare CORPUS -h, rskip prepare --src en -h and rskip prepare --text -h list the options."""
PUBLISHED = "Download a published corpus and prepare it for fairseq; FOLDER is data/CORPUS by default."
DESCRIPTIONS = {
    "prepare-corpus.sh": "Prepare your own parallel text (UTF-8, one sentence a line) for fairseq.",
    "prepare-text.sh": "Prepare your own text (UTF-8) for a language model, split by documents.",
}


def assignments(script: str, words: list[str]) -> str:
    """``name=value`` lines for bash. Raises ``UserError`` for files that do not exist."""
    if "" in words:
        raise UserError("an empty argument; -h lists the options")
    options = vars(read(script, words))
    values = {name: str(value or "") for name, value in options.items() if not name.startswith(SPLITS)}
    values["normalise"] = "--normalise-punctuation" if options["normalise"] else ""
    lists = {}
    if "src" in options:
        values["corpus"] = options["name"] or Path(options["folder"]).name
        if "input" in options:
            lists["inputs"] = [str(file) for file in text_files(Path(options["input"]))]
            lists["documents"] = ["--lines", str(options["lines"]), "--held-out", str(options["held_out"])]
        elif options["src"] == options["tgt"]:
            raise UserError(f"--src and --tgt are both {options['src']}")
        else:
            lists["inputs"] = [options[f"{split}_{side}"] for split in SPLITS for side in ("src", "tgt")]
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    return "\n".join([*lines, *(f"{name}=({shlex.join(words)})" for name, words in lists.items())])


def main(argv: list[str] | None = None) -> int:
    """Become the script that prepares the corpus named first, or your own text."""
    argv = sys.argv[1:] if argv is None else list(argv)
    return exit_status(lambda: _run(argv))


def _run(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    own = argv[0].startswith("-")
    if not own and argv[0] not in SCRIPTS:
        hint = did_you_mean(argv[0], SCRIPTS)
        raise UserError(f"no corpus named {argv[0]!r}; {hint or 'rskip prepare -h lists them'}")
    text = any(word == "--text" or word.startswith("--text=") for word in argv)
    script, *words = [f"prepare-{'text' if text else 'corpus'}.sh"] if own else SCRIPTS[argv[0]]
    path = ROOT / "data-prep" / script
    if not path.is_file():
        raise UserError(f"there is no {path}: rskip prepare needs a checkout of the project")
    os.environ["RSKIP_PROG"] = "rskip prepare" if own else f"rskip prepare {argv[0]}"
    os.execvp("bash", ["bash", str(path), *words, *(argv if own else argv[1:])])
