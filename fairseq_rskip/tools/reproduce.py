"""``rskip run`` and ``rskip reproduce``: run, report and list the experiments of YAML files."""

import argparse
import functools
import json
import shlex
from pathlib import Path

from fairseq_rskip.console import Parser, in_columns, print_line, to_argv, whole_number
from fairseq_rskip.errors import RESUME, UserError, exit_status
from fairseq_rskip.files import locked, write_json
from fairseq_rskip.tools import analyze
from fairseq_rskip.tools.corpus import NAMES, Corpus
from fairseq_rskip.tools.process import follow, stop_on_signals

from .experiments import execution, own_text, slurm
from .experiments.plan import Selection, make_tables
from .experiments.records import DIVERGED, DONE, RUNNING, Experiment, Run, State, Table, dashed
from .experiments.results import collect, distinct, ready, rows_that_wait, state
from .experiments.run_folder import read_record
from .experiments.task import RSKIP
from .experiments.tasks import TASKS
from .experiments.text_tasks import planned
from .experiments.yaml_file import FOLDER, read

INPUTS = "inputs.json"  # in the folder of your own text: what it is prepared from
INPUTS_LOCK = "inputs.lock"
DESCRIPTION = """Prepare, train, evaluate and report the experiments of YAML files
(docs/reproduce.md). The same command resumes stopped runs and tries failed ones again,
but for trainings that diverged. The page of
mine.yaml is runs/mine/report/report.html."""


def parse(argv: list[str] | None, command: str) -> argparse.Namespace:
    """The options of ``command``; if it is "", the first word of ``argv`` names the command.

    Raises ``UsageError``.
    """
    parser = Parser(description=DESCRIPTION)
    if command:
        _add_options(parser, command)
    else:
        commands = parser.add_subparsers(
            required=True, metavar="{list,run,report}", parser_class=Parser
        )
        for name, (_, text) in ACTIONS.items():
            _add_options(commands.add_parser(name, help=text), name)
    options = parser.parse_args(argv)
    if options.output is None:
        own = [Path(name).stem for name in options.tables if name.endswith((".yaml", ".yml"))]
        options.output = Path("runs") / (own[0] if own else "paper")
    options.output = options.output.expanduser().resolve()
    return options


def _add_options(parser: argparse.ArgumentParser, command: str) -> None:
    action, _ = ACTIONS[command]
    parser.set_defaults(action=action)
    add = parser.add_argument
    number = "*" if command == "list" else "+"
    add("tables", nargs=number, metavar="TABLE", help="a table's name, or the path of a YAML file")
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of the runs (runs/NAME for NAME.yaml, else runs/paper)",
    )
    _add_selection(parser)
    add("--no-figures", action="store_true", help="write the report without figures")
    if command == "run":
        _add_execution(parser)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose rows, columns, seeds and data, and change options."""
    add = parser.add_argument
    add("--rows", nargs="+", default=[], metavar="LABEL", help="only these rows")
    add("--columns", nargs="+", default=[], metavar="NAME", help="only these columns")
    add(
        "--seeds",
        nargs="+",
        type=whole_number(0),
        default=[],
        metavar="N",
        help="seeds to run (the table's)",
    )
    add("--corpus", default="", metavar="DATA", help="train on other data: a name or a folder")
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="set an option in every row, such as depth=20",
    )


def _add_execution(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rskip run`` alone."""
    add = parser.add_argument
    add("--dry-run", action="store_true", help="print the commands that would run")
    add(
        "--jobs",
        type=whole_number(1),
        metavar="N",
        help="number of parallel runs (default: one per GPU)",
    )
    add(
        "--slurm",
        nargs="*",
        metavar="KEY=VALUE",
        help="submit SLURM jobs with these options of sbatch",
    )


def _selection(options: argparse.Namespace) -> Selection:
    return Selection(options.rows, options.columns, options.seeds, options.corpus, options.set)


def _tables(options: argparse.Namespace) -> list[Experiment]:
    """The tables that ``options`` name and choose from. Raises ``UserError``."""
    experiments = make_tables(options.tables, _selection(options))
    for experiment in experiments:
        _check_figure_options(experiment)
    return experiments


def _check_figure_options(experiment: Experiment) -> None:
    """Raise ``UserError`` for options that ``rskip analyze`` does not have; it draws the figure."""
    figure = experiment.table.figure or "curves"
    try:
        analyze.parse([figure, *to_argv(dashed(experiment.table.figure_options)), "MODEL"])
    except UserError as error:
        raise UserError(f"{experiment.path}: figure_options of {figure}: {error}") from None


def list_tables(options: argparse.Namespace) -> None:
    """Print the title of every table, or of those named the numbers of networks and runs."""
    if not options.tables:
        if any(_selection(options)):
            raise UserError("--rows, --columns, --seeds, --corpus and --set need a TABLE")
        if not FOLDER.is_dir():
            raise UserError(
                f"there is no {FOLDER}: the paper's tables are in a checkout of the project; give "
                "this command there, or a YAML file of your own"
            )
        titles = []
        for path in sorted(FOLDER.glob("*.yaml")):
            titles.append((path.stem, read(path).get("title", "")))
        print_line("\n".join(in_columns(titles)))
        return
    for experiment in _tables(options):
        networks, runs = _count(experiment)
        what = f"{networks} networks, {runs} runs ({experiment.table.data})"
        print_line(f"{experiment.name}: {experiment.title}: {what}")


def _count(experiment: Experiment) -> tuple[int, int]:
    """The numbers of networks and of runs; rows of equal settings share both."""
    networks = {}
    for cell in experiment.cells:
        if cell.trials:
            networks[cell.trials[0].run.folder_in(Path(), 1)] = cell
    runs = 0
    for cell in networks.values():
        seeds = set(experiment.seeds_of(cell.row))
        if cell.decides:  # the best trial is one of those that were tried
            runs += len(cell.trials) + len(seeds - {experiment.sweep_seed})
        else:
            runs += len(seeds)
    return len(networks), runs


def run(options: argparse.Namespace) -> None:
    """Check, prepare, train, evaluate and report.

    Raises ``UserError`` if a run failed, another process has it, or a row's training diverged,
    after the others are done.
    """
    experiments = _tables(options)
    any_prepared = False
    for experiment in experiments:
        any_prepared |= prepare_data(experiment, options.dry_run)
    if any_prepared:  # a recipe is chosen by the size of the prepared text
        planned.cache_clear()
        experiments = _tables(options)
    for experiment in experiments:
        for warning in experiment.warnings:
            print_line(f"warning: {experiment.name}: {warning}", "stderr")
    if options.dry_run:
        return _show(experiments, options)
    _check_inputs(experiments, options)
    if options.slurm is not None:
        runs, _ = _untried(experiments, options, tried=set())
        return slurm.submit(runs, options.slurm, options.output)

    states = _run_all(experiments, options)
    report(options, experiments)
    _refuse_unfinished(experiments, options, states)


def _refuse_unfinished(
    experiments: list[Experiment], options: argparse.Namespace, states: list[State]
) -> None:
    """Raise ``UserError`` for runs that failed, that another process has, or that diverged."""
    unfinished = [each for each in states if each.kind not in (DONE, RUNNING, DIVERGED)]
    if unfinished:
        raise UserError(
            f"{len(unfinished)} of {len(states)} runs are not done, the first: {unfinished[0]}; "
            "the same command tries again"
        )
    elsewhere = [run for run in _ready(experiments, options) if state(run).kind == RUNNING]
    if elsewhere:
        raise UserError(
            f"another process executes {len(elsewhere)} of these runs, the first: {elsewhere[0]}; "
            "when it has ended, the same command does what is left"
        )
    diverged = _diverged(experiments, options.output)
    if diverged:
        raise UserError(
            f"without a value, because training diverged: {'; '.join(diverged)}; it would do so "
            "again: change an option, such as a lower lr, or remove a run's folder to repeat it"
        )


def _diverged(experiments: list[Experiment], out: Path) -> list[str]:
    """The runs of rows that diverged, and the sweeps of which no value is left."""
    names = []
    for experiment in experiments:
        for cell in experiment.cells:
            result = collect(experiment, cell, out)
            if result.trials and all(trial.state.kind == DIVERGED for trial in result.trials):
                names.append(f"{cell}, every value of its sweep")
            for seed, ended in result.states.items():
                if ended.kind == DIVERGED:
                    names.append(f"{cell}, seed {seed}")
    return names


def _run_all(experiments: list[Experiment], options: argparse.Namespace) -> list[State]:
    """Execute the runs that can start, then those that these have decided; returns the states."""
    environments = execution.environments(options.jobs)
    states: list[State] = []
    tried: set[tuple[Path, str]] = set()  # a failed run is not tried twice
    while True:
        runs, jobs = _untried(experiments, options, tried)
        if not runs:
            return states
        tried |= jobs
        more = _more(experiments, options)
        if more:
            print_line(f"{len(runs)} runs to start{more}")
        states += execution.run_all(runs, environments)


def _check_inputs(experiments: list[Experiment], options: argparse.Namespace) -> None:
    """Raise ``UserError`` for data and checkpoints that a run would refuse after hours."""
    checked = set()
    for experiment in experiments:
        for run in experiment.runs:
            if (experiment.task, run.data) not in checked:
                checked.add((experiment.task, run.data))
                TASKS[experiment.task].check_data(run.data)
    for run in _ready(experiments, options, without=(RUNNING, DONE, DIVERGED)):
        if problem := TASKS[run.task].missing_parent(run):
            raise UserError(f"{run.titled}, {problem}")


def _untried(
    experiments: list[Experiment], options: argparse.Namespace, tried: set[tuple[Path, str]]
) -> tuple[list[Run], set[tuple[Path, str]]]:
    """The runs to start now, one in each folder, and what they do; none does what was ``tried``.

    A training counts once for each of its evaluations: the second one starts when the first is
    over.
    """
    chosen: dict[Path, Run] = {}
    jobs = set()
    for run in _ready(experiments, options, without=(RUNNING, DONE, DIVERGED)):
        job = (run.folder, run.evaluation if run.scored else "")
        if job not in tried and run.folder not in chosen:
            jobs.add(job)
            chosen[run.folder] = run
    return list(chosen.values()), jobs


def prepare_data(experiment: Experiment, dry_run: bool = False) -> bool:
    """Prepare the data of ``experiment`` that is not prepared; a dry run prints the commands.

    Returns whether the text of any run was prepared. Raises ``UserError``.
    """
    any_prepared = False
    for data in dict.fromkeys(run.data for run in experiment.runs):
        text = experiment.texts.get(data)
        words = _own_text_words(text, data) if text else _corpus_words(data)
        if not words:
            continue
        command = [*RSKIP, *words]
        print_line(shlex.join(command))
        if dry_run:
            continue
        if text and not isinstance(text, Table.Published):
            any_prepared |= _prepare_own_text(text, data, command)
        else:
            _prepare(command)
            any_prepared = True
    return any_prepared


def _prepare_own_text(text: own_text.Text, folder: str, command: list[str]) -> bool:
    """Prepare ``text`` in ``folder``, unless another process has done it meanwhile.

    Returns whether it did. The file of inputs says of what text data-bin will be: only one process
    may write both.
    """
    with locked(Path(folder), INPUTS_LOCK, wait=True):
        if not _own_text_words(text, folder):
            return False
        write_json(Path(folder) / INPUTS, own_text.identity(text))
        _prepare(command)
    return True


def _prepare(command: list[str]) -> None:
    """Run ``rskip prepare`` and print what it prints. Raises ``UserError`` where it fails."""
    reason = follow(command, lambda line: print_line(line.decode("utf-8", "replace").rstrip()))
    if reason:
        raise UserError(f"the data is not prepared: {reason}")


def _corpus_words(name: str) -> list[str]:
    """The words of ``rskip prepare`` for a known corpus; [] if it is prepared, or a folder."""
    if name not in NAMES or Corpus.find_or_plan(name).exists:
        return []
    return ["prepare", name]


def _own_text_words(text: own_text.Text, folder: str) -> list[str]:
    """The words of ``rskip prepare`` for a text with options; [] if it is prepared.

    Raises ``UserError`` if the folder holds other text.
    """
    if not (Path(folder) / "data-bin").is_dir():
        return own_text.prepare_words(text, folder)
    if not _is_prepared(text, folder):
        raise UserError(
            f"{folder} was prepared from other text or options; name another 'folder', or remove it"
        )
    return []


def _is_prepared(text: own_text.Text, folder: str) -> bool:
    """Whether the data-bin in ``folder`` was made from ``text``, with its options."""
    if isinstance(text, Table.Published):  # perhaps by rskip prepare, without network
        preparation = Corpus.find(folder).preparation
        return own_text.facts(text, folder).items() <= preparation.items()
    inputs = Path(folder) / INPUTS
    return inputs.exists() and json.loads(inputs.read_text("utf-8")) == own_text.identity(text)


def _ready(
    experiments: list[Experiment], options: argparse.Namespace, without: tuple[str, ...] = ()
) -> list[Run]:
    """The runs that can start now, each once, but those in a state of a kind in ``without``."""
    runs = []
    for experiment in experiments:
        runs += ready(experiment, options.output)
    return [run for run in distinct(runs) if state(run).kind not in without]


def _show(experiments: list[Experiment], options: argparse.Namespace) -> None:
    """Print the commands that would run, and the number of runs that are done."""
    runs = _ready(experiments, options)
    ended = {DONE: 0, DIVERGED: 0}
    for run in runs:
        now = state(run)
        if now.kind in ended:
            ended[now.kind] += 1
            continue
        commands = TASKS[run.task].commands(run)
        complete = execution.count_complete(run, read_record(run.folder), commands)
        for command in commands[complete:]:
            print_line(f"{shlex.join(command)}  # {run}: {now}")
    diverged = f", {ended[DIVERGED]} diverged" if ended[DIVERGED] else ""
    more = _more(experiments, options)
    print_line(f"# {ended[DONE]} of {len(runs)} runs are done{diverged}{more}")


def _more(experiments: list[Experiment], options: argparse.Namespace) -> str:
    """What to say of the runs that wait for the end of a sweep; "" if none does."""
    waiting = sum(len(rows_that_wait(experiment, options.output)) for experiment in experiments)
    rows = "row" if waiting == 1 else "rows"
    return f"; more follow where sweeps end, in {waiting} {rows}" if waiting else ""


def report(options: argparse.Namespace, experiments: list[Experiment] | None = None) -> None:
    """Write the report of the tables that are named."""
    from fairseq_rskip.tools.report.main import write_report

    write_report(experiments or _tables(options), options.output, not options.no_figures)


ACTIONS = {
    "list": (list_tables, "print the tables, or of those named the numbers of runs"),
    "run": (run, "prepare, train, evaluate and report; trains only the missing runs"),
    "report": (report, "write the report again"),
}


def main(argv: list[str] | None = None, command: str = "") -> int:
    """Run the command in ``argv``; returns the exit status.

    Each mistake that the user can fix is one line.
    """

    def act() -> int | None:
        options = parse(argv, command)
        stop_on_signals()
        return options.action(options)

    return exit_status(act, RESUME)


run_file = functools.partial(main, command="run")
report_file = functools.partial(main, command="report")
