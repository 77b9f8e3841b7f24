"""What a table's numbers were made with, and whether it is the paper's experiment."""

from pathlib import Path
from typing import Any, Dict, Iterable, List, Tuple

from fairseq_rskip.tools.report.model import Group, Line
from fairseq_rskip.tools.reproduce import runs
from fairseq_rskip.tools.reproduce.plans import TASKS, Plan
from fairseq_rskip.tools.reproduce.results import TableResult
from fairseq_rskip.tools.train.recipes import GENERAL, RECIPES


def describe(result: TableResult, groups: List[Group]) -> List[Tuple[str, str]]:
    """Name and value of each condition."""
    table, plan = result.table, result.plan
    lines = [line for group in groups for line in group.lines if line.values]
    better = "lower" if TASKS[table.task].LOWER_IS_BETTER else "higher"
    signatures = _each(metrics.get("signatures", {}).get(table.metric) for metrics in _metrics(lines))
    units = _each(metrics.get("unit") for metrics in _metrics(lines))
    found = [
        ("metric", _join([table.metric, *units, f"{better} is better", *signatures])),
        ("data", data(result)),
        ("scale", "1, the whole length" if plan.scale == 1 else f"{plan.scale:g} of the whole length"),
        ("length of a run", " / ".join(result.length)),
        ("seeds", _seeds(plan, table.seeds)),
        ("changed in every row", options(plan.changed) or "nothing"),
    ]
    if plan.stand_in:
        found.append(("for the stand-in data", options(plan.stand_in)))
    if table.task == "translation":
        found += _recipes(result) + _weights(result, lines)
    return found + _software(lines)


def _recipes(result: TableResult) -> List[Tuple[str, str]]:
    """Where a translation is of other data: how that corpus's recipe differs from the table's own."""
    told = []
    for (_, column), settings in result.plan.settings.items():
        if not result.plan.data:
            continue
        own = result.table.columns[column].data or result.table.data
        here = TASKS["translation"].identity(settings)["data"]
        if here != own:
            told.append(f"{_recipe_name(here)}; {_recipe_name(own)} has {_different(here, own) or 'the same'}")
    return [("other settings", " / ".join(dict.fromkeys(told)))] if told else []


def _recipe_name(corpus: str) -> str:
    return f"the recipe of {corpus}" if corpus in RECIPES else f"the general recipe (for {corpus})"


def _different(here: str, own: str) -> str:
    """The settings of ``own`` that ``here`` does not have, each beside that one's, before --scale."""
    ours, papers = (RECIPES.get(name, RECIPES[GENERAL]) for name in (here, own))
    found = {"tokens a step": (papers.tokens, ours.tokens)}
    for name in ("lr", "dropout", "warmup-updates", "max-update", "max-epoch"):
        default = "the architecture's" if name in ("lr", "dropout") else "none"
        found[name] = tuple(recipe.options.get(name, default) for recipe in (papers, ours))
    return ", ".join(f"{name} {theirs} (not {mine})" for name, (theirs, mine) in found.items() if theirs != mine)


def _weights(result: TableResult, lines: List[Line]) -> List[Tuple[str, str]]:
    """Which checkpoints were averaged: as evaluate.sh has said, or as it will be told."""
    told = _each(metrics.get("weights") for metrics in _metrics(lines))
    if not told:
        asked = _each(settings.get("average") for settings in result.plan.settings.values())
        told = [f"average of the last {count} checkpoints" for count in asked]
    told = [each if len(told) == 1 else each.partition(":")[0] for each in told]
    return [("weights", " / ".join(dict.fromkeys(told)))] if told else []


def data(result: TableResult) -> str:
    """The data that was trained on, and what it stands in for."""
    here = ", ".join(result.data) or "none"
    return f"{here} in place of {', '.join(papers_data(result))}" if result.plan.data else here


def papers_data(result: TableResult) -> List[str]:
    """What the paper trained on."""
    return list(dict.fromkeys(column.data or result.table.data for column in result.table.columns.values()))


def warning(result: TableResult) -> str:
    """The sentence that keeps these numbers from being taken for the paper's; "" where they may stand beside them."""
    if result.whole:
        return ""
    listed = _changes(result, data(result))
    start = f"Not the paper's experiment{': ' * bool(listed)}{listed}; the values are not comparable with the paper's."
    return f"{start} R{_outdated(result)[1:]}." if result.outdated else start


def remark(result: TableResult) -> str:
    """The same for a figure, in few words."""
    if result.whole:
        return ""
    listed = [_changes(result, ", ".join(result.data)), _outdated(result)]
    return f"not the paper's experiment: {', '.join(filter(None, listed))}"


def papers(result: TableResult) -> str:
    """What the paper's values are of, "" where ours are of the same."""
    return "" if result.whole else f"full scale, {', '.join(papers_data(result))}"


def _changes(result: TableResult, trained_on: str) -> str:
    plan = result.plan
    changes = [f"scale {plan.scale:g}" if plan.scale != 1 else "", trained_on if plan.data else ""]
    return ", ".join(filter(None, [*changes, options(plan.changed), options(plan.stand_in)]))


def _outdated(result: TableResult) -> str:
    """The sentence on cells that were run before the table's file was changed."""
    if not result.outdated:
        return ""
    return f"run with other settings than {Path(result.table.path).name} has now: {', '.join(result.outdated)}"


def _seeds(plan: Plan, asked: List[int]) -> str:
    own = ", ".join(map(str, plan.seeds))
    told = f"{len(plan.seeds)} ({own})"
    return told if sorted(plan.seeds) == sorted(asked) else f"{told}; the table's: {len(asked)}"


def options(given: Dict[str, Any]) -> str:
    """Names and values in a row."""
    return ", ".join(f"{name} {value}" for name, value in given.items())


def _software(lines: List[Line]) -> List[Tuple[str, str]]:
    """Versions and commits of the finished runs, several where they differ."""
    about = [runs.read(folder / runs.RUN) for line in lines for folder in line.folders.values()]
    names = dict.fromkeys(name for each in about for name in each.get("versions", {}))
    versions = [f"{name} {' / '.join(_each(each.get('versions', {}).get(name) for each in about))}" for name in names]
    commits = _each(_short(each.get("git")) for each in about)
    return [("versions", ", ".join(versions) or "none recorded"), ("commit", " / ".join(commits) or "none recorded")]


def _short(commit: Any) -> str:
    commit, plus, _ = str(commit or "").partition("+")
    return commit[:10] + (" with changes" if plus else "")


def _metrics(lines: Iterable[Line]) -> List[Dict[str, Any]]:
    return [metrics for line in lines for metrics in line.metrics.values()]


def _each(values: Iterable[Any]) -> List[str]:
    return [str(value) for value in dict.fromkeys(values) if value]


def _join(parts: List[str]) -> str:
    return ", ".join(dict.fromkeys(parts))
