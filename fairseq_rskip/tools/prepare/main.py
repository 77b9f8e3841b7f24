"""``rskip prepare``: its options, read for data-prep/common.sh, which does the work stage by stage."""

import argparse
import itertools
import json
import math
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from fairseq_rskip.console import Parser, between, whole_number
from fairseq_rskip.errors import RESUME, UserError, did_you_mean, exit_status
from fairseq_rskip.files import lock_holder, locked
from fairseq_rskip.tools.corpus import NAMES, ROOT
from fairseq_rskip.tools.prepare.text import text_files
from fairseq_rskip.tools.process import follow, stop_on_signals

FOLDER = ROOT / "data-prep"
# your own parallel text, and your own text for a language model: data-prep/prepare-NAME.sh
OWN: dict[str, dict[str, Any]] = {"corpus": {"bpe-size": 32000}, "text": {"bpe": "sentencepiece", "bpe-size": 8000}}
SPLITS = ("train", "valid", "test")
CORPORA = [name for name in NAMES if name != "numbers"]
USAGE = f"""usage: rskip prepare CORPUS [option ...] [FOLDER]
       rskip prepare --src en --tgt de --train-src FILE --train-tgt FILE ... FOLDER
       rskip prepare --text FILE-or-FOLDER [option ...] FOLDER

Make FOLDER/data-bin, which training and evaluation take, from a published corpus or from your own text.
CORPUS is {", ".join(CORPORA)}.
rskip prepare CORPUS -h, rskip prepare --src en -h and rskip prepare --text FILE -h list the options."""
ABOUT = {
    "corpus": "Prepare your own parallel text (UTF-8, one sentence a line) for fairseq.",
    "text": "Prepare your own text (UTF-8) for a language model, split by documents.",
}
PUBLISHED = "Download a published corpus and prepare it for fairseq; FOLDER is data/CORPUS by default."
RESUMES = "Each stage runs once: after an interruption or an error the same command resumes where it stopped."


def language(text: str) -> str:
    """A type for argparse: a language code."""
    if not re.fullmatch("[A-Za-z_]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a language code such as en")
    return text


def existing(text: str) -> str:
    """A type for argparse: the absolute path of a file."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"no file {text}")
    return os.path.abspath(text)


def read(prog: str, name: str, row: dict[str, Any], words: list[str]) -> argparse.Namespace:
    """The options ``words`` for the corpus ``name`` of ``OWN`` or corpora.yaml, whose ``row`` has the defaults."""
    parser = Parser(prog=prog, description=ABOUT.get(name, PUBLISHED), epilog=RESUMES)
    add, targets, code = parser.add_argument, row.get("tgt", []), {"type": language, "metavar": "LANG"}
    add("folder", nargs=None if name in OWN else "?", default="", metavar="FOLDER", help="write FOLDER/data-bin")
    parser.set_defaults(src="en", tgt=targets[0] if targets else "", vocabulary="joint", max_length=0, max_ratio=0)
    if name == "text":
        source = "a text file, maybe gzipped, with blank lines between documents; or a folder of *.txt documents"
        add("--text", type=os.path.abspath, required=True, dest="input", metavar="PATH", help=source)
        add("--lines", type=whole_number(1), default=0, metavar="N", help="a document is N lines")
        share = "share of the documents for validation, and for the test (%(default)s)"
        add("--held-out", type=between(0, 0.5), default=0.05, metavar="P", help=share)
        add("--lang", **code, default="en", dest="src", help="language code (%(default)s)")
    if name == "corpus":
        add("--src", **code, required=True, help="language code of the source, such as en")
        add("--tgt", **code, required=True, help="language code of the target")
        for split, side in itertools.product(SPLITS, ("src", "tgt")):
            add(f"--{split}-{side}", type=existing, required=True, metavar="FILE", help=f"{split} text, may be gzipped")
    if targets[1:]:
        add("--tgt", choices=targets, metavar="LANG", help=f"{' or '.join(targets)} (%(default)s)")
    if name in OWN:
        tokenizer = "none: the text is tokenised already (moses)"
        add("--tokenizer", choices=["moses", "none"], default="moses", help=tokenizer)
        add("--name", default="", help="name of the corpus (default: FOLDER's name)")
    else:
        add("--from", default="", metavar="DIR-or-URL", help="take the archives from a folder or a mirror")
        add("--archives", default="", metavar="FILE", help="use this list, not data-prep/archives/CORPUS.tsv")
    kinds, size = ["subword-nmt", "sentencepiece", "none"], "merges, or sentencepiece's vocabulary (%(default)s)"
    add("--bpe", choices=kinds, default=row.get("bpe", kinds[0]), help="kind of subwords (%(default)s)")
    add("--bpe-size", type=whole_number(1), default=row["bpe-size"], metavar="N", help=size)
    add("--normalise-punctuation", dest="normalise", action="store_true", help="make quotes and dashes ASCII first")
    if name == "corpus" or any(targets):
        add("--separate", dest="vocabulary", action="store_const", const="separate", help="subwords for each language")
        longest = "longest training sentence in subwords (%(default)s)"
        add("--max-length", type=whole_number(1), default=250, metavar="N", help=longest)
        most = "drop training pairs above this ratio of lengths (%(default)s)"
        add("--max-ratio", type=between(1, math.inf), default=1.5, metavar="X", help=most)
    add("--workers", type=whole_number(1), metavar="N", help="number of processes (all cores)")
    return parser.parse_args(words)


def variables(name: str, row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The variables of common.sh, text or lists, for the corpus ``name``. Raises ``UserError``."""
    values = {key: value for key, value in vars(options).items() if not key.startswith(SPLITS)}
    values |= {"documents": row.get("documents", ""), "normalise": "--normalise-punctuation" * options.normalise}
    if options.src == options.tgt:
        raise UserError(f"--src and --tgt are both {options.src}")
    known = name if name in NAMES else f"{name}-en-{options.tgt}"
    corpus = (options.name or Path(options.folder).name) if name in OWN else known
    out = Path(options.folder or ROOT / "data" / corpus).absolute()
    if name == "text":
        values["inputs"] = list(map(str, text_files(Path(options.input))))
        values["documents"] = options.lines
    elif name == "corpus":
        texts = {split: [getattr(options, f"{split}_{side}") for side in ("src", "tgt")] for split in SPLITS}
        values |= {split: ["files", *files] for split, files in texts.items()}
        values["inputs"] = list(itertools.chain.from_iterable(texts.values()))
    else:
        values |= {split: ["parts", *(str(out / part) for part in row[split])] for split in SPLITS}
        values |= {"tokenizer": row["tokenizer"], "unpack": [*itertools.chain.from_iterable(row["unpack"].items())]}
    if options.bpe == "sentencepiece":
        values["tokenizer"] = "none"
    facts = {"corpus": corpus, **{key: values[key] for key in ("src", "tgt", "bpe", "bpe_size", "tokenizer")}}
    facts |= {"normalise_punctuation": options.normalise, "joined_dictionary": options.vocabulary == "joint"}
    return {**values, "corpus": corpus, "out": str(out), "facts": json.dumps(facts)}


def prepare(argv: list[str]) -> int:
    """Prepare the corpus named first, or your own text; return the exit status. Raises ``UserError``."""
    if "" in argv:
        raise UserError("an empty argument; -h lists the options")
    own = "text" if any(word.partition("=")[0] == "--text" for word in argv) else "corpus"
    name, *words = [own, *argv] if argv[0].startswith("-") else argv
    prog = sys.argv[0] if sys.argv[0].endswith(".sh") else "rskip prepare" + f" {name}" * (name not in OWN)
    if name.startswith("multi30k-en-") and name in CORPORA:
        name, words = "multi30k", ["--tgt", name[-2:], *words]
    if not (FOLDER / "common.sh").is_file():
        raise UserError(f"there is no {FOLDER}: rskip prepare needs a checkout of the project")
    import yaml

    rows = OWN | yaml.safe_load((FOLDER / "corpora.yaml").read_text("utf-8"))
    if name not in rows:
        hint = did_you_mean(name, CORPORA)
        raise UserError(f"no corpus named {name!r}; {hint or 'rskip prepare -h lists them'}")
    values = variables(name, rows[name], read(prog, name, rows[name], words))
    quoted = {k: f"({shlex.join(v)})" if isinstance(v, list) else shlex.quote(str(v or "")) for k, v in values.items()}
    script = [f"{key}={value}" for key, value in quoted.items()]
    script += [f"source {shlex.quote(str(FOLDER / 'common.sh'))}", "make_all"]
    stop_on_signals()
    with locked(out := Path(values["out"])) as lock:
        if lock is None:
            raise UserError(f"another preparation of {out} is running ({lock_holder(out)})")
        return int(bool(follow(["bash", "-c", "\n".join(script)], inherit=[lock.fileno()])))


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    if argv[:1] in ([], ["-h"], ["--help"]):
        print(USAGE)
        return 0
    return exit_status(lambda: prepare(argv), RESUME)
