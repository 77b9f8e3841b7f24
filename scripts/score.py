#!/usr/bin/env python3
"""Score translations against references, each score with its signature.

    score.py --hyp out.de --ref newstest2014.de --src-lang en --tgt-lang de --json scores.json

Give plain text, one sentence a line: sacreBLEU tokenises by itself. docs/evaluation.md says which BLEU is which.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from evaluation import metrics  # noqa: E402
from evaluation.options import Parser  # noqa: E402
from evaluation.text import InputError, check_lengths, read_lines, write_json  # noqa: E402


def parse(argv=None):
    parser = Parser(description=__doc__)
    parser.add_argument("--hyp", type=Path, required=True, metavar="FILE", help="the translations")
    parser.add_argument("--ref", type=Path, required=True, nargs="+", metavar="FILE", help="one or more references")
    parser.add_argument("--src-lang", metavar="LANG", help="language of the source, such as en")
    parser.add_argument("--tgt-lang", required=True, metavar="LANG", help="language of both files, such as de")
    parser.add_argument(
        "--tokenised",
        action="store_true",
        help="the files hold tokens already: tokenised BLEU takes them as they are",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the scores there, too")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    """Print the table, write the JSON file; returns the exit status."""
    options = parse(argv)
    try:
        hypotheses = read_lines(options.hyp)
        references = {path: read_lines(path) for path in options.ref}
        check_lengths(hypotheses, references, options.hyp)
        rows = metrics.compute(
            hypotheses, list(references.values()), options.tgt_lang, options.src_lang, options.tokenised
        )
        if options.json:
            write_json(options.json, metrics.report(rows, options.hyp, options.ref, len(hypotheses)))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(metrics.table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
