"""What a table's numbers were made with, and whether it is the experiment that its file describes."""

from pathlib import Path
from typing import Any, Dict, Iterable, List, Tuple

from fairseq_rskip.tools.reproduce import runs
from fairseq_rskip.tools.reproduce.plans import Plan
from fairseq_rskip.tools.reproduce.tables import HELD_OUT
from fairseq_rskip.tools.reproduce.translation import recipe_name
from fairseq_rskip.tools.train.recipes import NAMES, RECIPES

from .numbers import Line, Result, options


def describe(result: Result) -> List[Tuple[str, str]]:
    """Name and value of each condition."""
    table, plan = result.table, result.plan
    lines = [line for line in result.lines if line.values]
    better = "lower" if table.lower_is_better else "higher"
    signatures = _each(metrics.get("signatures", {}).get(table.metric) for metrics in _metrics(lines))
    units = _each(unit(line, table.metric) for line in lines)
    found = [
        ("metric", _join([table.metric, *units, f"{better} is better", *signatures])),
        ("data", data(result)),
        ("scale", "1, the whole length" if plan.scale == 1 else f"{plan.scale:g} of the whole length"),
        ("length of a run", " / ".join(result.length)),
        ("seeds", _seeds(plan, table.seeds)),
        ("options of every row", options(table.options) or "the defaults"),
        ("changed in every row", options(plan.changed) or "nothing"),
        ("evaluation", options(table.evaluate)),
    ]
    found += [("for the stand-in data", options(plan.stand_in))] if plan.stand_in else []
    if any(line.trials for line in result.lines):
        values = options({name: " / ".join(map(str, values)) for name, values in table.sweep.items()})
        tried = (
            f"each value with the first {table.sweep_seeds}"
            if table.sweep_seeds > 1
            else "each value with the first seed"
        )
        found.append(("sweep", _join([values, f"{tried}, chosen by {HELD_OUT[table.task]} on the held-out set"])))
    if table.task == "translation":
        found += _recipes(result) + _weights(result, lines)
    return [(name, value) for name, value in found + _software(lines) if value]


def settings(result: Result) -> List[str]:
    """What each row and column is made of, and what its sweep has found."""
    table = result.table
    found = [f"{name}: {options(column.options)}" for name, column in table.columns.items() if column.options]
    for row in table.rows:
        arch = row.arch if isinstance(row.arch, str) else options(row.arch)
        said = ", ".join(filter(None, [arch, options(row.options)]))
        found += [f"{row.label}: {said}"] if row.run and said else []
    return found


def sweeps(result: Result) -> List[str]:
    """A sentence for each row with a sweep: the values, the chosen one, and whether it lies on the border."""
    found = []
    for line in result.lines:
        tried = [f"{options(t.swept)}: {t.state if t.value is None else f'{t.value:.3f}'}" for t in line.trials]
        if tried:
            name = " / ".join(filter(None, [line.label, line.column]))
            chosen = f"; chosen {options(line.chosen)}" if line.chosen else "; not decided yet"
            border = f", on the border of the sweep ({', '.join(line.border)})" if line.border else ""
            found.append(f"Sweep of {name}, {HELD_OUT[result.table.task]}: {', '.join(tried)}{chosen}{border}.")
    return found


def unit(line: Line, metric: str) -> str:
    """Of the metric, as the first finished run of ``line`` says; losses have none."""
    return next((m["unit"] for m in line.metrics.values() if m.get("unit") and "loss" not in metric), "")


def _recipes(result: Result) -> List[Tuple[str, str]]:
    """Where a translation is of other data: how that corpus's recipe differs from the table's own."""
    told = []
    if not result.plan.data:
        return _own_recipe(result)
    for cell in result.plan.cells:
        own = result.table.columns[cell.column].data or result.table.data
        settings = cell.variants[0].settings
        if settings.identity["data"] != own:
            here, there = recipe_name(settings.data), recipe_name(own)
            whose = f" (for {settings.identity['data']})" if here not in NAMES else ""
            told.append(
                f"the recipe of {here}{whose}; the recipe of {there} has {_different(here, there) or 'the same'}"
            )
    return [("other settings", " / ".join(dict.fromkeys(told)))]


def _own_recipe(result: Result) -> List[Tuple[str, str]]:
    """Of a corpus of one's own: the recipe that its size has chosen."""
    places = dict.fromkeys(variant.settings.data for cell in result.plan.cells for variant in cell.variants)
    names = dict.fromkeys(recipe_name(place) for place in places if Path(place).is_dir())
    return [
        (f"recipe {name}", _join([f"{RECIPES[name].tokens} tokens per step", options(RECIPES[name].options)]))
        for name in names
        if name not in NAMES
    ]


def _different(here: str, own: str) -> str:
    """The settings of ``own`` that ``here`` does not have, each beside that one's, before --scale."""
    ours, papers = RECIPES[here], RECIPES[own]
    found = {"tokens per step": (papers.tokens, ours.tokens)}
    for name in ("lr", "dropout", "warmup-updates", "max-update", "max-epoch"):
        default = "the architecture's" if name in ("lr", "dropout") else "none"
        found[name] = tuple(recipe.options.get(name, default) for recipe in (papers, ours))
    return ", ".join(f"{name} {theirs} (not {mine})" for name, (theirs, mine) in found.items() if theirs != mine)


def _weights(result: Result, lines: List[Line]) -> List[Tuple[str, str]]:
    """Which checkpoints were averaged: as evaluate.sh has said, or as it will be told."""
    told = _each(metrics.get("weights") for metrics in _metrics(lines))
    if not told:
        asked = _each(variant.settings.average for cell in result.plan.cells for variant in cell.variants)
        told = [f"average of the last {count} checkpoints" for count in asked]
    return [("weights", _join(each if len(told) == 1 else each.partition(":")[0] for each in told))]


def data(result: Result) -> str:
    """The data that was trained on, and what it stands in for."""
    here = ", ".join(result.data) or "none"
    return f"{here} in place of {', '.join(papers_data(result))}" if result.plan.data else here


def papers_data(result: Result) -> List[str]:
    """What the table's file names."""
    return list(dict.fromkeys(column.data or result.table.data for column in result.table.columns.values()))


def not_it(result: Result) -> str:
    """What a shortened or changed table is called."""
    return "not the paper's experiment" if result.table.source else "not the whole experiment"


def warning(result: Result) -> str:
    """The sentence that keeps these numbers from being taken for the file's; "" where they may stand beside them."""
    if result.whole:
        return ""
    listed, whose = _changes(result, data(result)), "paper's" if result.table.source else "whole one's"
    start = (
        f"{not_it(result).capitalize()}{': ' * bool(listed)}{listed}; the values are not comparable with the {whose}."
    )
    return f"{start} R{_outdated(result)[1:]}." if result.outdated else start


def remark(result: Result) -> str:
    """The same for a figure, in few words."""
    listed = [_changes(result, ", ".join(result.data)), _outdated(result)]
    return "" if result.whole else f"{not_it(result)}: {', '.join(filter(None, listed))}"


def papers(result: Result) -> str:
    """What the paper's values are of, "" where ours are of the same."""
    return "" if result.whole else f"full scale, {', '.join(papers_data(result))}"


def _changes(result: Result, trained_on: str) -> str:
    plan = result.plan
    changes = [f"scale {plan.scale:g}" if plan.scale != 1 else "", trained_on if plan.data else ""]
    return ", ".join(filter(None, [*changes, options(plan.changed), options(plan.stand_in)]))


def _outdated(result: Result) -> str:
    """The sentence on cells that were run before the table's file was changed."""
    if not result.outdated:
        return ""
    return f"run with other settings than {Path(result.table.path).name} has now: {', '.join(result.outdated)}"


def _seeds(plan: Plan, asked: List[int]) -> str:
    told = f"{len(plan.seeds)} ({', '.join(map(str, plan.seeds))})"
    return told if sorted(plan.seeds) == sorted(asked) else f"{told}; the table's: {len(asked)}"


def _software(lines: List[Line]) -> List[Tuple[str, str]]:
    """Versions and commits of the finished runs, several where they differ."""
    about = [runs.read(folder) for line in lines for folder in line.folders.values()]
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


def _join(parts: Iterable[str]) -> str:
    return ", ".join(filter(None, dict.fromkeys(parts)))
