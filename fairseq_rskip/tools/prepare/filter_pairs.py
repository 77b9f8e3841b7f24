"""Keep the training pairs whose lengths in subwords are possible and alike, as Moses' clean-corpus-n.perl does for
fairseq: 1 to 250 on either side, neither more than 1.5 times the other. Say what share each rule dropped."""

import sys

from fairseq_rskip.console import Parser, finite, whole_number
from fairseq_rskip.errors import RESUME, UserError, exit_status
from fairseq_rskip.tools import lines

WARN_ABOVE = 0.05  # of the pairs, dropped by one rule


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("sources", nargs=2, metavar="source", help="files to read, source and target")
    parser.add_argument("targets", nargs=2, metavar="target", help="files to write")
    parser.add_argument("--max-length", type=whole_number(1), default=250, help="subwords")
    parser.add_argument("--max-ratio", type=finite, default=1.5, help="of one length to the other, either way")
    options = parser.parse_args(argv)
    empty, long, uneven = "an empty side", f"--max-length {options.max_length}", f"--max-ratio {options.max_ratio:g}"
    dropped = {empty: 0, long: 0, uneven: 0}
    pairs = 0
    with lines.writing(options.targets[0]) as source_file, lines.writing(options.targets[1]) as target_file:
        for source, target in lines.paired(*map(lines.read, options.sources), options.sources):
            pairs += 1
            shorter, longer = sorted((len(source.split()), len(target.split())))
            if shorter == 0:
                dropped[empty] += 1
            elif longer > options.max_length:
                dropped[long] += 1
            elif longer > options.max_ratio * shorter:
                dropped[uneven] += 1
            else:
                source_file.write(source + "\n")
                target_file.write(target + "\n")
        kept = pairs - sum(dropped.values())
        if not kept:
            raise UserError(f"none of the {pairs:,} training pairs is left: see --max-length and --max-ratio")
    shares = {rule: f"{100 * count / pairs:.1f} %" for rule, count in dropped.items()}
    summary = ", ".join(f"{share} by {rule}" for rule, share in shares.items())
    print(f"filter: kept {kept:,} of {pairs:,} training pairs; dropped {summary}", flush=True)
    for rule, count in dropped.items():
        if count > WARN_ABOVE * pairs:
            print(f"warning: {rule} drops {shares[rule]} of the training pairs ({count:,})", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(exit_status(main, RESUME))
