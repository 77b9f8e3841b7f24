"""``rskip run`` and ``rskip reproduce``: run the experiments of YAML files, report them, list them."""

import argparse
import math
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from fairseq_rskip.console import Parser, print_line, whole_number
from fairseq_rskip.errors import RESUME, UserError, exit_status

DESCRIPTION = """The paper's tables, studies, and your own experiments, one YAML file each (docs/reproduce.md).

  list [TABLE ...]      tables, rows, number of runs
  run table1            prepare, train, evaluate and report; trains only the missing runs
  report table1         write the report again"""
RUN = """Prepare, train, evaluate and report the experiments of a YAML file (docs/reproduce.md). The same command
resumes what was stopped and tries again what failed.

  rskip run mine.yaml                 everything in runs/mine, the page in runs/mine/report/report.html
  rskip run mine.yaml --dry-run       print the commands"""


def parse(argv: list[str] | None, prog: str | None = None) -> argparse.Namespace:
    """The options. A mistake ends the program with one line."""
    if prog == "rskip run":
        options = _add_run(Parser(prog=prog, description=RUN)).parse_args(argv)
        options.command = "run"
    else:
        parser = Parser(prog=prog, description=DESCRIPTION)
        commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
        listing = commands.add_parser("list", help="tables, or the rows of the tables that are named")
        listing.add_argument("tables", nargs="*", metavar="TABLE")
        _add_run(commands.add_parser("run", help="train and evaluate what is not done, and report"))
        _add_report(_add_selection(commands.add_parser("report", help="write the report")))
        options = parser.parse_args(argv)
    if options.command != "list":
        own = [Path(name) for name in options.tables if name.endswith((".yaml", ".yml"))]
        output = options.output or Path("runs") / (own[0].stem if own else "paper")
        options.output = output.expanduser().resolve()
    return options


def _add_selection(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("tables", nargs="+", metavar="TABLE", help="a table's name, or the path of a YAML file")
    parser.add_argument("--output", type=Path, metavar="DIR", help="(runs/FILE without .yaml; for names runs/paper)")
    parser.add_argument("--rows", nargs="+", default=[], metavar="LABEL", help="only these rows")
    parser.add_argument("--columns", nargs="+", default=[], metavar="NAME", help="only these columns")
    parser.add_argument("--seeds", nargs="+", type=whole_number(0), metavar="N", help="instead of the table's")
    parser.add_argument("--corpus", metavar="DATA", help="train on other data: a name or a folder")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="an option for every row: depth=20")
    parser.set_defaults(to=None, test=None, resamples=None, examples=None, no_figures=False)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    _add_selection(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the commands that would run")
    parser.add_argument("--jobs", type=whole_number(1), metavar="N", help="parallel runs (one per GPU; on CPU one)")
    slurm = parser.add_argument("--slurm", nargs="*", metavar="KEY=VALUE")
    slurm.help = "submit the runs as SLURM jobs with these options of sbatch, and return"
    return parser


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", type=Path, metavar="DIR", help="folder of the report (OUTPUT/report)")
    tests = ("welch", "randomisation", "bootstrap")
    parser.add_argument("--test", choices=tests, help="test of translation scores (randomisation)")
    parser.add_argument("--resamples", type=whole_number(100), metavar="N", help="trials of that test")
    parser.add_argument("--examples", type=whole_number(1), metavar="N", help="images or sentences for gradients, ratio")
    parser.add_argument("--no-figures", action="store_true", help="write tables only")


def list_tables(options: argparse.Namespace) -> None:
    """Print every table, or the rows of those named."""
    from .plan import make_tables
    from .yaml_file import paths

    every = argparse.Namespace(rows=[], columns=[], seeds=None, corpus=None, set=[], tables=options.tables or paths())
    for table in make_tables(every):
        runs = {run.place(Path(), 1) for cell in table.cells for _, run in cell.variants}
        cells = {cell.variants[0][1].place(Path(), 1): cell for cell in table.cells if cell.variants}
        tried = [math.prod(map(len, cell.sweep.values())) for cell in cells.values()]
        count = sum(len(table.seeds) + (each - 1) * len(table.tried) for each in tried)
        about = f"{len(table.seeds)} seeds" + (", with sweeps" if len(runs) > len(cells) else "")
        print_line(f"{table.name:<12} {table.title}: {len(cells)} networks, {about}, {count} runs ({table.data})")
        for cell in table.cells if options.tables else ():
            settings = " ".join(f"{name}={value}" for name, value in {**cell.options, **cell.sweep}.items())
            reported = "" if cell.reported is None else f"reported {cell.reported}"
            print_line("  " + "  ".join(filter(None, [str(cell), reported, cell.arch, settings])))


def run(options: argparse.Namespace) -> None:
    """Check, prepare, train, evaluate and report. Raises ``UserError`` if a run failed; the others are done."""
    from . import execution
    from .own_text import prepare_all
    from .plan import make_tables

    tables = make_tables(options)
    for table in tables:
        for warning in table.warnings:
            print_line(f"warning: {table.name}: {warning}", "stderr")
        prepare_all(table, options)
    if options.dry_run:
        return _show(tables, options)
    tables = make_tables(options)  # a recipe is chosen by the size of the prepared text
    _check_data(tables)
    if options.slurm is not None:
        from .slurm import submit

        return submit([run for run in _ready(tables, options) if _is_open(run)], options.slurm, options.output)
    places, states, seen = execution.environments(options.jobs), [], set()
    while runs := [run for run in _ready(tables, options) if run.folder not in seen]:
        seen.update(run.folder for run in runs)
        states += execution.run_all([run for run in runs if _is_open(run)], list(places))
    report(options, tables)
    failed = [state for state in states if state.startswith("failed")]
    if failed:
        more = " (others above)" if len(set(failed)) > 1 else ""
        raise UserError(f"{len(failed)} of {len(states)} runs {failed[0]}{more}; the same command tries again")


def _ready(tables: list[Any], options: argparse.Namespace) -> list[Any]:
    from .plan import ready
    from .results import collect

    runs = [run for table in tables for run in ready(table, collect(table, options.output), options.output)]
    return list({run.folder: run for run in runs}.values())


def _is_open(run: Any) -> bool:
    """Whether the run is to be started; says why if it is running."""
    from .records import DONE, RUNNING
    from .results import state

    if (now := state(run)).startswith(RUNNING):
        print_line(f"{run}: {now}, by another command")
    return not now.startswith((DONE, RUNNING))


def _check_data(tables: list[Any]) -> None:
    from .tasks import TASKS

    for table in tables:
        for data in dict.fromkeys(run.data for cell in table.cells for _, run in cell.variants):
            try:
                TASKS[table.task].check_data(data)
            except UserError as error:
                raise UserError(f"{table.name} cannot run: {error}") from None


def _show(tables: list[Any], options: argparse.Namespace) -> None:
    """Print the commands of what would be run, and how much is done."""
    from .results import collect, state
    from .tasks import TASKS

    runs, states = _ready(tables, options), []
    for run in runs:
        states.append(state(run))
        if states[-1] != "done":
            print_line(f"# {run}: {states[-1]}")
            for command in TASKS[run.task].commands(run):
                print_line(shlex.join(command))
    for result in [result for table in tables for result in collect(table, options.output)]:
        if result.trials and result.waits:
            print_line(f"# {result.cell}: {result.waits}; then the best with all seeds")
    print_line(f"# {states.count('done')} of {len(runs)} runs are done")


def report(options: argparse.Namespace, tables: list[Any] | None = None) -> None:
    """Write the report of the tables that are named."""
    from fairseq_rskip.tools.report.main import write_report

    from .plan import make_tables

    write_report(tables or make_tables(options), options)


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Do what ``argv`` asks for; returns the exit status. What the user can fix is one line for each mistake."""
    try:
        options = parse(argv, prog)
    except SystemExit as end:
        return end.code or 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, _interrupt)
    action = {"list": list_tables, "run": run, "report": report}[options.command]
    return exit_status(lambda: action(options), RESUME)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
