"""``rskip run`` and ``rskip reproduce``: run the experiments of YAML files, report them, list them."""

import argparse
import functools
import hashlib
import json
import shlex
from pathlib import Path

from fairseq_rskip.console import Parser, as_words, print_line, whole_number
from fairseq_rskip.errors import RESUME, UserError, exit_status
from fairseq_rskip.files import write_json
from fairseq_rskip.tools.corpus import NAMES, Corpus
from fairseq_rskip.tools.prepare.text import text_files
from fairseq_rskip.tools.process import follow, stop_on_signals

from . import execution
from .plan import make_tables, ready, state
from .records import Run, Table, dashed
from .tasks import RSKIP, TASKS, planned
from .yaml_file import FOLDER

INPUTS = "inputs.json"  # in the folder of your own text: what it is prepared from
DESCRIPTION = """Prepare, train, evaluate and report the experiments of YAML files (docs/reproduce.md). The same command
resumes what was stopped and tries again what failed. The page of mine.yaml is runs/mine/report/report.html."""


def parse(argv: list[str] | None, command: str) -> argparse.Namespace:
    """The options of ``command``, which is their first word if it is "". A mistake ends the program with one line."""
    parser = Parser(description=DESCRIPTION)
    if command:
        _add_options(parser, command)
    else:
        commands = parser.add_subparsers(required=True, metavar="{list,run,report}", parser_class=Parser)
        for name, (_, text) in ACTIONS.items():
            _add_options(commands.add_parser(name, help=text), name)
    options = parser.parse_args(argv)
    own = [Path(name).stem for name in options.tables if name.endswith((".yaml", ".yml"))]
    options.output = (options.output or Path("runs") / [*own, "paper"][0]).expanduser().resolve()
    return options


def _add_options(parser: argparse.ArgumentParser, command: str) -> None:
    add, number = parser.add_argument, "*" if command == "list" else "+"
    parser.set_defaults(action=ACTIONS[command][0])
    add("tables", nargs=number, metavar="TABLE", help="a table's name, or the path of a YAML file")
    add("--output", type=Path, metavar="DIR", help="folder of the runs (runs/NAME for NAME.yaml, else runs/paper)")
    add("--rows", nargs="+", default=[], metavar="LABEL", help="only these rows")
    add("--columns", nargs="+", default=[], metavar="NAME", help="only these columns")
    add("--seeds", nargs="+", type=whole_number(0), metavar="N", help="seeds to run (the table's)")
    add("--corpus", metavar="DATA", help="train on other data: a name or a folder")
    add("--set", nargs="+", default=[], metavar="NAME=VALUE", help="set an option in every row, such as depth=20")
    add("--no-figures", action="store_true", help="write the report without figures")
    if command == "run":
        add("--dry-run", action="store_true", help="print the commands that would run")
        add("--jobs", type=whole_number(1), metavar="N", help="number of parallel runs (default: one per GPU)")
        add("--slurm", nargs="*", metavar="KEY=VALUE", help="submit SLURM jobs with these options of sbatch")


def list_tables(options: argparse.Namespace) -> None:
    """Print the tables with their numbers of networks and runs."""
    options.tables = options.tables or sorted(path.stem for path in FOLDER.glob("*.yaml"))
    for table in make_tables(options):
        cells = list({cell.variants[0][1].place(Path(), 1): cell for cell in table.cells if cell.variants}.values())
        count = sum(len(table.seeds) + len(cell.variants) - 1 for cell in cells)
        print_line(f"{table.name:<12} {table.title}: {len(cells)} networks, {count} runs ({table.data})")


def run(options: argparse.Namespace) -> None:
    """Check, prepare, train, evaluate and report. Raises ``UserError`` if a run failed; the others are done."""
    tables = make_tables(options)
    for table in tables:
        for warning in table.warnings:
            print_line(f"warning: {table.name}: {warning}", "stderr")
        prepare_data(table, options.dry_run)
    if options.dry_run:
        return _show(tables, options)
    tables = make_tables(options)  # with what preparation has made
    for task, data in {(table.task, run.data) for table in tables for cell in table.cells for _, run in cell.variants}:
        TASKS[task].check_data(data)
    if options.slurm is not None:
        return execution.submit(_ready(tables, options, ("running", "done")), options.slurm, options.output)
    places, states, seen = execution.environments(options.jobs), [], set()
    while runs := [run for run in _ready(tables, options, ("running", "done")) if run.folder not in seen]:
        seen.update(run.folder for run in runs)
        states += execution.run_all(runs, list(places))
    report(options, tables)
    if failed := [each for each in states if each.startswith("failed")]:
        raise UserError(f"{len(failed)} of {len(states)} runs {failed[0]}; the same command tries again")


def prepare_data(table: Table, dry_run: bool = False) -> None:
    """Prepare the data of ``table`` that is not prepared; a dry run prints the commands. Raises ``UserError``."""
    for data in dict.fromkeys(run.data for cell in table.cells for _, run in cell.variants):
        text, inputs = table.texts.get(data), Path(data) / INPUTS
        if text is None and (data not in NAMES or Corpus.find(data, must_exist=False).exists):
            continue
        command, key = _of_text(text, data) if text else ([*RSKIP, "prepare", data], {})
        if text and (Path(data) / "data-bin").is_dir():
            if inputs.exists() and json.loads(inputs.read_text("utf-8")) == key:
                continue
            raise UserError(f"{data} was prepared from other text or options; name another 'folder', or remove it")
        print_line(shlex.join(command))
        if not dry_run:
            if text:
                Path(data).mkdir(parents=True, exist_ok=True)
                write_json(inputs, key)
            if follow(command, lambda line: print_line(line.decode("utf-8", "replace").rstrip())):
                raise UserError("the data is not prepared: rskip prepare failed, see above")
            planned.cache_clear()  # a recipe is chosen by the size of the prepared text


def _of_text(text: Table.OwnText | Table.Documents, folder: str) -> tuple[list[str], dict[str, str]]:
    """The command, and what its result depends on: options and content. Raises ``UserError`` for missing files."""
    words, names = as_words(dashed(text.options)), {}
    if isinstance(text, Table.Documents):
        names["text"] = text.text
    else:
        words = ["--src", text.source, "--tgt", text.target, *words]
        for split in ("train", "valid", "test"):
            names |= {f"{split}-{side}": name for side, name in zip(("src", "tgt"), getattr(text, split))}
    key = {"options": shlex.join(words)}
    for option, name in names.items():
        path, content = Path(name).expanduser().absolute(), hashlib.sha256()
        for file in text_files(path):
            content.update(file.read_bytes())
        key[option] = content.hexdigest()
        words += [f"--{option}", str(path)]
    return [*RSKIP, "prepare", *words, folder], key


def _ready(tables: list[Table], options: argparse.Namespace, without: tuple[str, ...] = ("-",)) -> list[Run]:
    """The runs that can start now, each once, but those in a state of ``without``."""
    runs = {run.folder: run for table in tables for run in ready(table, options.output)}
    return [run for run in runs.values() if not state(run).startswith(without)]


def _show(tables: list[Table], options: argparse.Namespace) -> None:
    """Print the commands of what would be run, and how much is done."""
    states = [(run, state(run)) for run in _ready(tables, options)]
    for run, now in states:
        for command in TASKS[run.task].commands(run) if now != "done" else ():
            print_line(f"{shlex.join(command)}  # {run}: {now}")
    print_line(f"# {[now for _, now in states].count('done')} of {len(states)} runs are done")


def report(options: argparse.Namespace, tables: list[Table] | None = None) -> None:
    """Write the report of the tables that are named."""
    from fairseq_rskip.tools.report.main import write_report

    write_report(tables or make_tables(options), options)


ACTIONS = {
    "list": (list_tables, "print the tables and their numbers of runs"),
    "run": (run, "prepare, train, evaluate and report; trains only the missing runs"),
    "report": (report, "write the report again"),
}


def main(argv: list[str] | None = None, command: str = "") -> int:
    """Do what ``argv`` asks for; returns the exit status. What the user can fix is one line for each mistake."""
    options = parse(argv, command)
    stop_on_signals()
    return exit_status(lambda: options.action(options), RESUME)


run_file = functools.partial(main, command="run")
