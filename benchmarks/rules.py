"""Measure what each rule costs: a training step, and the memory it keeps for the backward pass.

Both are ratios to pre-norm's, in the benchmark of a Transformer (benchmarks/transformer.py), whose
contenders are the architectures transformer_NAME; a few of them take turns with pre-norm at a time.
Admin is left out: it starts from a batch of a training's data.

  python -m benchmarks.rules                 every rule, half an hour
  python -m benchmarks.rules --rules keel    only these; the file's other rows stay
"""

import argparse
import functools

import pandas

from fairseq_rskip.errors import UserError
from fairseq_rskip.models.architectures import VARIANTS

from . import harness, transformer

BASE = "preln"
NEEDS_DATA = "admin"
GROUP = 5  # contenders that take turns with pre-norm: so many processes share the memory


def table(args: argparse.Namespace) -> list[harness.Row]:
    """The rows of every architecture that is measured now, or has one in the file already."""
    if args.quick:
        args.size = "quick"
    args.work = ["training"]
    rows = {}
    if args.csv.exists():
        earlier = pandas.read_csv(args.csv)
        if "rule" not in earlier:
            raise UserError(f"{args.csv} is another table: expected one of this benchmark, or none")
        rows = {row["rule"]: row for row in earlier.to_dict("records")}
    others = [name for name in args.rules or VARIANTS if name not in (BASE, NEEDS_DATA)]
    for first in range(0, len(others), GROUP):
        rows |= {row["rule"]: row for row in measure(others[first : first + GROUP], args)}
        rows = {name: rows[name] for name in VARIANTS if name in rows}
        harness.write(args.csv, list(rows.values()))  # an interruption loses one group
    return list(rows.values())


def measure(names: list[str], args: argparse.Namespace) -> list[harness.Row]:
    """A row for each of ``names``, which take turns with pre-norm. Raises ``UserError``."""
    contenders = {**vars(args), "contenders": [BASE, *names]}
    base, *rows = transformer.table(argparse.Namespace(**contenders))
    about = {**harness.machine(args.device), "dtype": args.dtype, "rounds": args.rounds}
    return [
        {
            "rule": row["model"],
            "size": row["size"],
            "tokens": row["tokens"],
            "step": round(1 / row[f"training_over_{BASE}"], 3),
            "kept": round(row["saved_MB"] / base["saved_MB"], 3),
            **about,
        }
        for row in rows
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rules", nargs="+", choices=VARIANTS, metavar="NAME", help="only these (default: all)"
    )
    parser.add_argument(
        "--size", choices=transformer.SIZES, default="small", help="(default: %(default)s)"
    )


main = functools.partial(harness.main, table, "rule_cost.csv", 5, __doc__, add_options)

if __name__ == "__main__":
    raise SystemExit(main())
