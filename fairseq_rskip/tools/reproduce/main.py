"""What ``scripts/reproduce.py`` does: list, run, status, report, execute."""

import argparse
import math
import shlex
import signal
import sys
from collections.abc import Callable
from typing import Any

import yaml

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import RESUME, UserError, exit_status

from . import loading, local, plans, runs, slurm, tables
from .execution import execute
from .options import parse
from .plans import TASKS, Plan, Run
from .runs import Outcome, collect, ready_runs
from .tables import Options, StandIn, Table


class RunsFailed(UserError):
    """Of what was run here, something failed; the rest is done."""


def list_tables(options: argparse.Namespace) -> None:
    """Every table, or the rows of those named."""
    named = loading.load_named(options.experiments, options.tables)
    for table in (named or loading.load_all(options.experiments, warn)).values():
        cells = [cell for cell in tables.cells(table) if cell.run]
        different = [cell for at, cell in enumerate(cells) if not any(map(cell.is_twin, cells[:at]))]
        count = sum(_count_runs(cell, table) for cell in different)
        seeds = f"{len(table.seeds)} seed{'s' * (len(table.seeds) > 1)}"
        seeds += ", with sweeps" if any(cell.sweep for cell in cells) else ""
        print_line(f"{table.name:<8} {table.title}: {len(different)} networks x {seeds} = {count} runs ({table.data})")
        for cell in cells if named else ():
            reported = "" if cell.reported is None else f"reported {cell.reported}"
            settings = " ".join(f"{name}={value}" for name, value in {**cell.options, **cell.sweep}.items())
            shown = "  ".join(filter(None, [str(cell), reported, cell.arch, settings]))
            print_line(f"  {shown}")
    if not named:
        for name, stand_in in loading.load_stand_ins(options.experiments).items():
            print_line(f"--corpus {name}: {stand_in.data} stands in for the data of {stand_in.task}")


def _count_runs(cell: tables.Cell, table: Table) -> int:
    tried = math.prod(map(len, cell.sweep.values()))
    return len(table.seeds) + (tried - 1) * len(table.seeds[: table.sweep_seeds])


def run(options: argparse.Namespace) -> None:
    """Plan, show or do the runs. Raises ``UserError`` if one failed."""
    made = [make_plan(table, options) for table in loading.load_named(options.experiments, options.tables).values()]
    if options.dry_run:
        return show(made, options)
    places = local.environments(options.jobs) if options.launcher == "local" else []
    if options.launcher == "slurm":
        slurm.check(options)
    for plan in made:
        plans.check_data(plan)
    for plan in made:
        plans.save(plan, options.output)
    if options.launcher == "local":
        return run_here(made, places, options)
    slurm.submit(_ready(made, options), options)
    for outcome in _open_sweeps(made, options):
        print_line(f"{outcome.cell}: {outcome.waits_for_sweep}; the same command then submits its other seeds")


def run_here(made: list[Plan], places: list[dict[str, str]], options: argparse.Namespace) -> None:
    """Do the runs on this machine, after sweeps also what they have chosen. Raises ``RunsFailed`` if one failed."""
    states, seen = [], set()
    while waiting := [run for run in _ready(made, options) if run.folder not in seen]:
        seen.update(run.folder for run in waiting)
        todo = runs.still_to_do(waiting)
        for run in todo:
            runs.prepare(run)
        states += local.run_all(todo, places)
    failed = [state.detail for state in states if state.name == runs.BROKEN]
    if failed:
        reasons = failed[0] + (" (others above)" if len(set(failed)) > 1 else "")
        raise RunsFailed(f"{len(failed)} of {len(states)} runs failed: {reasons}; the same command tries again")


def show(made: list[Plan], options: argparse.Namespace) -> None:
    """The commands of what would be run."""
    for run in _ready(made, options):
        print_line(f"# {run}: {runs.state(run)}")
        for command in run.commands():
            print_line(shlex.join(command))
    for outcome in _open_sweeps(made, options):
        seeds = options.seeds or "to come"
        print_line(f"# {outcome.cell}: {outcome.waits_for_sweep}; then the best with seeds {seeds}")


def _ready(made: list[Plan], options: argparse.Namespace) -> list[Run]:
    return list({run.folder: run for plan in made for run in ready_runs(plan, options.output)}.values())


def _open_sweeps(made: list[Plan], options: argparse.Namespace) -> list[Outcome]:
    found = [collect(plan, cell, options.output) for plan in made for cell in plan.cells]
    return [outcome for outcome in found if outcome.waits_for_sweep]


def make_plan(table: Table, options: argparse.Namespace) -> Plan:
    """The plan that the command line asks for. Raises ``UserError``."""
    stand_in, data = find_stand_in(table, options.corpus, loading.load_stand_ins(options.experiments))
    chosen = plans.choose_cells(table, options.rows, options.columns)
    return plans.make_plan(
        table, stand_in, data, options.scale, parse_changes(options.set), list(options.seeds or table.seeds), chosen
    )


def find_stand_in(table: Table, corpus: str | None, known: dict[str, StandIn]) -> tuple[StandIn, str]:
    """What ``--corpus`` means for ``table``, and the data to train on ("" for the table's). Raises ``UserError``."""
    task = TASKS[table.task]
    if corpus is None:
        return StandIn(table.task, table.data), ""
    if corpus in known:
        if known[corpus].task != table.task:
            raise UserError(f"--corpus {corpus} is for {known[corpus].task}, and {table.name} is of {table.task}")
        return known[corpus], task.find_data(known[corpus].data)
    data = task.find_data(corpus)
    same = [s for s in known.values() if s.task == table.task and s.data == task.data_name(data)]
    return (same or [StandIn(table.task, data)])[0], data


def status(options: argparse.Namespace) -> None:
    """Every plan with the state of its runs."""
    found = plans.load_all(options.output)
    if not found:
        print_line(f"nothing has been run in {options.output}; rskip reproduce list shows what can be")
    known = list(dict.fromkeys(plan.table.name for plan in found))
    for name in options.tables:
        if name not in known:
            raise UserError(f"no table named {name!r} has been run here; there are {', '.join(known) or 'none'}")
    for plan in found:
        if plan.table.name in (options.tables or known):
            print_line(f"{plan.name}: {plan.table.title}" + ("" if plan.whole else " (not as the table's file has it)"))
            for cell in plan.cells:
                _show_outcome(plan, collect(plan, cell, options.output))


def _show_outcome(plan: Plan, outcome: Outcome) -> None:
    metric = plan.table.metric
    for trial in outcome.trials:
        said = trial.state if trial.value is None else f"{tables.HELD_OUT[plan.table.task]} {trial.value:.3f}"
        mark = "  chosen" if trial.swept == outcome.chosen else ""
        swept = ", ".join(f"{name} {value}" for name, value in trial.swept.items())
        print_line(f"  {outcome.cell}, {swept}: {said}{mark}")
    for seed, state in outcome.states.items():
        value = outcome.metrics.get(seed, {}).get("values", {}).get(metric)
        shown = "" if value is None else f"  {metric} {value:.{3 if 'loss' in metric else 2}f}"
        print_line(f"  {outcome.cell}, seed {seed}: {state}{shown}")


def parse_changes(words: list[str]) -> Options:
    """``--set`` NAME=VALUE, the values as YAML has them. Raises ``UserError``."""
    result: Options = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.lstrip("-").replace("_", "-")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError):
            value = text
        if not name or not equals or not isinstance(value, (bool, int, float, str, list)):
            raise UserError(f"--set {word}: expected NAME=VALUE, an option without its dashes, such as depth=20")
        if name in result:
            raise UserError(f"--set {word}: {name} is given twice")
        result[name] = value
    return result


def report(options: argparse.Namespace) -> None:
    """Write the report of all plans."""
    from fairseq_rskip.tools.report.main import write_report

    write_report(options)


def execute_one(options: argparse.Namespace) -> int:
    """Do the run of one prepared folder, by hand or by a launcher of one's own."""
    state = execute(options.folder)
    print_line(f"{state} {options.folder}")
    return 0 if state.name in (runs.DONE, runs.RUNNING) else 1


def warn(line: str) -> None:
    """Print ``line`` to stderr."""
    print_line(line, "stderr")


ACTIONS = {"list": list_tables, "run": run, "status": status, "report": report, "execute": execute_one}


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand; returns the exit status. What the user can fix is one line on standard error."""
    return work(parse, argv, lambda options: ACTIONS[options.command](options))


def work(parse: Callable[..., argparse.Namespace], argv: list[str] | None, action: Callable[..., Any]) -> int:
    """``action`` with the options that ``parse`` reads from ``argv``; returns the exit status."""
    try:
        options = parse(argv)
    except SystemExit as end:
        return end.code or 0
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
        signal.signal(signal.SIGHUP, _interrupt)
    return exit_status(lambda: action(options), RESUME)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
