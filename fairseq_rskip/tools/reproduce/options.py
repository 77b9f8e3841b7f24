"""The command line of scripts/reproduce.py."""

import argparse
import math
import re
from pathlib import Path

from fairseq_rskip.console import Parser, between, whole_number

from .loading import FOLDER
from .tables import TESTS

ABOVE_0 = between(0, math.inf, open_below=True)
SLURM_OPTIONS = ("partition", "account", "qos", "gpus", "cpus", "mem", "time", "array_size", "slurm")
RESERVED = "array error job-name nodes ntasks ntasks-per-node open-mode output signal wrap".split()

DESCRIPTION = """The paper's tables and figures, and your own, from your own runs (docs/reproduce.md).

  reproduce.py list [TABLE ...]             what there is: tables, rows, number of runs
  reproduce.py run table1                   train and evaluate what is not done yet
  reproduce.py status                       what has become of it
  reproduce.py report                       tables beside the paper's values: Markdown, LaTeX, HTML"""
RUN_DESCRIPTION = """One YAML file from its data to its report (docs/reproduce.md): prepares what is not prepared,
trains and evaluates what is not done, and writes the report. The same command resumes, and tries again what failed.

  rskip run mine.yaml                       everything in runs/mine, the page in runs/mine/report/report.html
  rskip run mine.yaml --dry-run             print the commands, and do nothing"""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options, defaults filled in. A mistake ends the program with one line."""
    parser = Parser(description=DESCRIPTION)
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
    if options.command == "run":
        _check_launcher(parser, options)
    return options


def parse_experiment(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of ``rskip run``: those of `run`, the report's at their defaults."""
    parser = Parser(prog="rskip run", description=RUN_DESCRIPTION)
    parser.add_argument("--output", type=Path, metavar="DIR", help="(runs/FILE, without .yaml)")
    _add_run(parser)
    parser.set_defaults(experiments=FOLDER, to=None, test=None, resamples=None, examples=None, no_figures=False)
    options = parser.parse_args(argv)
    output = options.output or Path("runs") / Path(options.tables[0]).stem
    options.output = output.expanduser().resolve()
    _check_launcher(parser, options)
    return options


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tables", nargs="+", metavar="TABLE", help="a table's name, or the path of a YAML file")
    parser.add_argument("--rows", nargs="+", default=[], metavar="LABEL", help="only these rows, by the paper's label")
    parser.add_argument("--columns", nargs="+", default=[], metavar="LABEL", help="only these columns")
    parser.add_argument("--seeds", nargs="+", type=whole_number(0), metavar="N", help="in place of the table's")
    parser.add_argument("--corpus", metavar="DATA", help="other data: a name or a folder (`list` shows stand-ins)")
    parser.add_argument("--scale", type=ABOVE_0, default=1.0, metavar="S", help="S times as many updates (1)")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="an option for every row: depth=20")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and do nothing")
    parser.add_argument("--launcher", choices=("local", "slurm"), default="local", help="where to run (local)")
    parser.add_argument("--jobs", type=whole_number(1), metavar="N", help="local: so many runs at a time (one a GPU)")
    slurm = parser.add_argument_group("--launcher slurm: a job for each run")
    slurm.add_argument("--partition", metavar="NAME", help="(the cluster's default)")
    slurm.add_argument("--account", metavar="NAME")
    slurm.add_argument("--qos", metavar="NAME")
    slurm.add_argument("--gpus", type=whole_number(0), metavar="N", help="of a run, all on one node (1)")
    slurm.add_argument("--cpus", type=whole_number(1), metavar="N", help="of a run (8)")
    slurm.add_argument("--mem", metavar="SIZE", help="of a run, such as 64G (the cluster's default)")
    slurm.add_argument("--time", type=_minutes, metavar="T", help="minutes, HH:MM:SS or D-HH:MM:SS of a job (1-00)")
    slurm.add_argument("--array-size", type=whole_number(1), metavar="N", help="so many jobs at a time (256)")
    other = slurm.add_argument("--slurm", nargs="+", type=_sbatch_option, metavar="KEY[=VALUE]")
    other.help = "any other option of sbatch"


def _check_launcher(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program if an option is given that the launcher does not have."""
    others, launcher = (SLURM_OPTIONS, "slurm") if options.launcher == "local" else (["jobs"], "local")
    for name in others:
        if getattr(options, name) is not None:
            parser.error(f"--{name.replace('_', '-')} is an option of --launcher {launcher}")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tables", nargs="*", metavar="TABLE")
    parser.add_argument("--to", type=Path, metavar="DIR", help="where the report goes (report in the output folder)")
    test = parser.add_argument("--test", choices=TESTS)
    test.help = "of scores of translations (the table's, or randomisation); all else has welch"
    resamples = parser.add_argument("--resamples", type=whole_number(100), metavar="N")  # fewer give no two digits
    resamples.help = "of that test (10,000 trials, or 1,000 resamples)"
    examples = parser.add_argument("--examples", type=whole_number(1), metavar="N")
    examples.help = "of gradients and ratio, in place of the table's"
    parser.add_argument("--no-figures", action="store_true", help="tables alone")


def _minutes(text: str) -> int:
    """A time as sbatch has it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; in minutes, rounded up."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: expected minutes, HH:MM:SS or D-HH:MM:SS")
    days, *parts = (int(part or 0) for part in found.groups())
    hours_first = found[1] is not None or found[4] is not None
    seconds = sum(part * unit for part, unit in zip(parts, (3600, 60, 1) if hours_first else (60, 1, 0)))
    return math.ceil((days * 86400 + seconds) / 60)


def _sbatch_option(text: str) -> tuple[str, str | bool]:
    """KEY=VALUE, or KEY for an option without a value, as sbatch has it."""
    key, equals, value = text.lstrip("-").partition("=")
    if not re.fullmatch(r"[a-z][a-z-]+", key) or (equals and not value) or not value.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r}: expected KEY=VALUE, an option of sbatch such as constraint=a100")
    if key in (*SLURM_OPTIONS, *RESERVED, "cpus-per-task", "gpus-per-node"):
        raise argparse.ArgumentTypeError(f"{text!r}: {key} is set already, by an option of its own or for every job")
    return key, value if equals else True
