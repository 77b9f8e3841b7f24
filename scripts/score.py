#!/usr/bin/env python3
"""Score translations against references, each score with its signature.

    score.py --hyp out.de --ref newstest2014.de --src-lang en --tgt-lang de --json scores.json

Give plain text, one sentence a line: sacreBLEU tokenises by itself. docs/evaluation.md says which BLEU is which.
"""

import os
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS))


def use_environment(missing: str) -> None:
    """Start again in the project's own environment, where no other is active; else end with one line."""
    environment = SCRIPTS.parent / ".venv"
    python = environment / "bin" / "python"
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    if not active and python.exists() and Path(sys.prefix).resolve() != environment.resolve():
        os.execv(python, [str(python), *sys.argv])
    sys.exit(f"error: {missing} is not installed; scripts/setup_env.sh makes an environment that has it")


try:
    from evaluation import ending, metrics
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    use_environment(error.name)
from evaluation.text import check_lengths, read_lines, write_json  # noqa: E402

from fairseq_rskip.tools.console import Parser  # noqa: E402


def parse(argv=None):
    parser = Parser(description=__doc__)
    parser.add_argument("--hyp", type=Path, required=True, metavar="FILE", help="the translations")
    parser.add_argument("--ref", type=Path, required=True, nargs="+", metavar="FILE", help="one or more references")
    parser.add_argument("--src-lang", metavar="LANG", help="language of the source, such as en")
    parser.add_argument(
        "--tgt-lang",
        metavar="LANG",
        help="language of both files, such as de; without it, rows that need its tokeniser are left out",
    )
    parser.add_argument(
        "--tokenised",
        action="store_true",
        help="the files hold tokens already: tokenised BLEU takes them as they are",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the scores there, too")
    return parser.parse_args(argv)


def score(options) -> None:
    """Write the JSON file, print the table. Raises ``InputError``."""
    hypotheses = read_lines(options.hyp)
    references = {path: read_lines(path) for path in options.ref}
    check_lengths(hypotheses, references, options.hyp)
    rows = metrics.compute(hypotheses, list(references.values()), options.tgt_lang, options.src_lang, options.tokenised)
    if options.json:
        write_json(options.json, metrics.report(rows, options.hyp, options.ref, len(hypotheses)))
    print(metrics.table(rows))
    lacking = metrics.left_out(options.tgt_lang, options.tokenised)
    if lacking:
        print(f"left out without --tgt-lang: {', '.join(lacking)}")


def main(argv=None) -> int:
    """Do what ``argv`` asks for; returns the exit status."""
    options = parse(argv)
    return ending.run(lambda: score(options))


if __name__ == "__main__":
    sys.exit(main())
