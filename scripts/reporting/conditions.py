"""What a table's numbers were made with, and whether it is the paper's experiment."""

from typing import Any, Dict, Iterable, List, Tuple

from reproduction import runs
from reproduction.plans import TASKS, Plan
from reproduction.results import TableResult

from reporting.model import Group, Line


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
    return found + _software(lines)


def data(result: TableResult) -> str:
    """The data that was trained on, and what it stands in for."""
    here = ", ".join(result.data) or "none"
    return f"{here} in place of {', '.join(papers_data(result))}" if result.plan.data else here


def papers_data(result: TableResult) -> List[str]:
    """What the paper trained on."""
    return list(dict.fromkeys(column.data or result.table.data for column in result.table.columns.values()))


def warning(result: TableResult) -> str:
    """The sentence that keeps these numbers from being taken for the paper's; "" where they may stand beside them."""
    plan = result.plan
    if plan.whole:
        return ""
    changes = [f"scale {plan.scale:g}" if plan.scale != 1 else "", data(result) if plan.data else ""]
    changes += [options(plan.changed), options(plan.stand_in)]
    listed = ", ".join(filter(None, changes))
    return f"Not the paper's experiment: {listed}; the values are not comparable with the paper's."


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
