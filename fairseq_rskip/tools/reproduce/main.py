"""What ``scripts/reproduce.py`` does: list, run, status, report, execute."""

import argparse
import shlex
import signal
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import yaml

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.console import print_line
from fairseq_rskip.tools.reproduce import local, plans, runs, tables
from fairseq_rskip.tools.reproduce.execution import execute
from fairseq_rskip.tools.reproduce.plans import TASKS, Job, Plan
from fairseq_rskip.tools.reproduce.results import collect
from fairseq_rskip.tools.reproduce.tables import Cell, Options, StandIn, Table

say = print_line  # whoever reads may stop reading: the runs continue


def list_tables(options: argparse.Namespace) -> None:
    """Every table, or the rows of those named."""
    known = tables.load_all(options.experiments)
    for table in _named(options.tables, known).values() if options.tables else known.values():
        cells = [cell for cell in tables.cells(table) if cell.run]
        count = sum(not any(plans.is_twin(cell, other) for other in cells[:at]) for at, cell in enumerate(cells))
        total = f"{count} networks x {len(table.seeds)} seeds = {count * len(table.seeds)} runs"
        say(f"{table.name:<8} {table.title}: {total} ({table.data})")
        for cell in cells if options.tables else ():
            reported = "" if cell.reported is None else f"reported {cell.reported}"
            settings = " ".join(f"{name}={value}" for name, value in cell.options.items())
            shown = "  ".join(filter(None, [_title(cell), reported, cell.arch, settings]))
            say(f"  {shown}")
    if not options.tables:
        for name, stand_in in tables.load_stand_ins(options.experiments).items():
            say(f"--corpus {name}: {stand_in.data} stands in for the data of {stand_in.task}")


def run(options: argparse.Namespace) -> int:
    """Plan, show or do the runs; returns the exit status."""
    known = tables.load_all(options.experiments)
    made: List[Plan] = []
    wanted: Dict[Path, Job] = {}
    for table in _named(options.tables, known).values():
        plan = make_plan(table, options)
        made.append(plan)
        wanted.update({job.folder: job for job in plans.jobs(plan, table.task, options.output)})
    if options.dry_run:
        for job in wanted.values():
            say(f"# {local.name(job)}: {runs.state(job)}")
            for command in job.commands():
                say(shlex.join(command))
        return 0
    places = local.environments(options.jobs) if options.launcher == "local" else []
    if options.launcher == "slurm":
        from fairseq_rskip.tools.reproduce import slurm

        slurm.check(options)
    for plan in made:
        plans.check_data(plan, known[plan.table].task)
    for plan in made:
        plans.save(plan, options.output)
    waiting = []
    for job in wanted.values():
        state = runs.state(job)
        if state.name in (runs.DONE, runs.RUNNING):
            say(f"{state} already {local.name(job)}")
        else:
            runs.prepare(job)
            waiting.append(job)
    if options.launcher == "slurm":
        return slurm.submit(waiting, options, say)
    states = local.run_all(waiting, places, say)
    failed = [state for state in states if state.name == runs.BROKEN]
    if failed:
        raise UserError(f"{len(failed)} of {len(states)} runs failed; reproduce.py status shows why")
    return 0


def make_plan(table: Table, options: argparse.Namespace) -> Plan:
    """The plan that the command line asks for. Raises ``UserError``."""
    stand_in, data = find_stand_in(table, options.corpus, tables.load_stand_ins(options.experiments))
    chosen = plans.choose_cells(table, options.rows or [], options.columns or [])
    return plans.make_plan(
        table, stand_in, data, options.scale, parse_changes(options.set), list(options.seeds or table.seeds), chosen
    )


def find_stand_in(table: Table, corpus: Optional[str], known: Dict[str, StandIn]) -> Tuple[StandIn, str]:
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
    known = tables.load_all(options.experiments)
    found = plans.load_all(options.output)
    if not found:
        say(f"nothing has been run in {options.output}; reproduce.py list shows what can be")
    _named(options.tables, {**known, **{plan.table: known.get(plan.table) for plan in found}})
    for plan in found:
        table = known.get(plan.table)
        if options.tables and plan.table not in options.tables:
            continue
        if table is None:
            say(f"{plan.name}: {options.experiments} holds no {plan.table}.yaml any more")
            continue
        say(f"{plan.name}: {table.title}" + ("" if plan.whole else " (not the paper's settings)"))
        for result in collect(plan, table, options.output, compare=False).cells.values():
            cell, values = result.cell, result.values(table.metric)
            for seed, state in result.states.items():
                shown = f"  {table.metric} {values[seed]:.2f}" if seed in values else ""
                say(f"  {_title(cell)}, seed {seed}: {state}{shown}")


def _title(cell: Cell) -> str:
    return " / ".join(filter(None, [cell.row, cell.column]))


def _named(names: List[str], known: Dict[str, Table]) -> Dict[str, Table]:
    """The tables of these names. Raises ``UserError``."""
    for name in names:
        if name not in known:
            raise UserError(f"no table named {name!r}; there are {', '.join(known)}")
    return {name: known[name] for name in names}


def parse_changes(words: List[str]) -> Options:
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


def main(options: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit status. What the user can mend is one line on standard error."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup sets it
        signal.signal(signal.SIGHUP, _interrupt)
    actions: Dict[str, Any] = {
        "list": list_tables,
        "run": run,
        "status": status,
        "report": report,
        "execute": execute_one,
    }
    try:
        return actions[options.command](options) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename or 'the file system'}: {error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("error: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 1


def report(options: argparse.Namespace) -> int:
    """Write the report of all plans."""
    from fairseq_rskip.tools.report.main import write_report

    return write_report(options)


def execute_one(options: argparse.Namespace) -> int:
    """What a launcher starts elsewhere: the run of one prepared folder."""
    state = execute(options.folder)
    say(f"{state} {options.folder}")
    return 0 if state.name in (runs.DONE, runs.RUNNING) else 1


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
