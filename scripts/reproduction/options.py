"""The command line of scripts/reproduce.py."""

import argparse
import math
from pathlib import Path
from typing import List, NoReturn, Optional

from reproduction.tables import FOLDER

DESCRIPTION = """The paper's tables and figures from your own runs (docs/reproduce.md).

  reproduce.py list [TABLE ...]             what there is: tables, rows, number of runs
  reproduce.py run table1                   train and evaluate what is not done yet
  reproduce.py status                       what has become of it
  reproduce.py report                       tables beside the paper's values: Markdown, LaTeX, HTML"""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (-h lists the options)\n")


def parse(argv: Optional[List[str]] = None) -> argparse.Namespace:
    """The options, defaults filled in. A mistake ends the program with one line."""
    parser = Parser(prog="reproduce.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--output", type=Path, default=Path("runs/paper"), metavar="DIR", help="(runs/paper)")
    shared.add_argument("--experiments", type=Path, default=FOLDER, metavar="DIR", help="where the tables are")
    listing = commands.add_parser("list", parents=[shared], help="tables, or the rows of the tables named")
    listing.add_argument("tables", nargs="*", metavar="TABLE")
    _add_run(commands.add_parser("run", parents=[shared], help="train and evaluate what is not done yet"))
    status = commands.add_parser("status", parents=[shared], help="the state of every run")
    status.add_argument("tables", nargs="*", metavar="TABLE")
    _add_report(commands.add_parser("report", parents=[shared], help="tables beside the paper's values"))
    execute = commands.add_parser("execute", parents=[shared], help="do the run of one folder that `run` prepared")
    execute.add_argument("folder", type=Path)
    options = parser.parse_args(argv)
    options.output = options.output.expanduser().resolve()
    return options


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tables", nargs="+", metavar="TABLE")
    parser.add_argument("--rows", nargs="+", metavar="LABEL", help="only these rows, by the paper's label")
    parser.add_argument("--columns", nargs="+", metavar="LABEL", help="only these columns")
    parser.add_argument("--seeds", nargs="+", type=_seed, metavar="N", help="in place of the table's")
    parser.add_argument("--corpus", metavar="NAME|PATH", help="other data in place of the table's (`list` names some)")
    parser.add_argument(
        "--scale", type=_scale, default=1.0, metavar="S", help="this part of the length and its schedule"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="an option for every row: depth=20")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and do nothing")
    parser.add_argument("--launcher", choices=("local", "slurm"), default="local", help="where to run (local)")
    parser.add_argument("--jobs", type=_count, metavar="N", help="local: so many runs at a time (one a GPU)")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tables", nargs="*", metavar="TABLE")


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer >= 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer >= 1")
    return value


def _scale(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and 0 < value <= 1):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0, and 1 at most")
    return value
