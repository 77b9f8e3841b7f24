"""What a table's numbers were made with, and whether it is the experiment that its file describes."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fairseq_rskip.tools.reproduce import runs
from fairseq_rskip.tools.reproduce.tables import HELD_OUT
from fairseq_rskip.tools.reproduce.translation import recipe_name
from fairseq_rskip.tools.train.recipes import NAMES, RECIPES

from .numbers import Line, Result, options


def describe(result: Result) -> list[tuple[str, str]]:
    """Name and value of each condition."""
    table, plan = result.table, result.plan
    metrics = [each for line in result.lines for each in line.metrics]
    signatures = _each(each.get("signatures", {}).get(table.metric) for each in metrics)
    units = _each(unit(line, table.metric) for line in result.lines)
    better = "lower" if table.lower_is_better else "higher"
    seeds = f"{len(plan.seeds)} ({', '.join(map(str, plan.seeds))})"
    seeds += "" if sorted(plan.seeds) == sorted(table.seeds) else f"; the table's: {len(table.seeds)}"
    found = [
        ("metric", ", ".join([table.metric, *units, f"{better} is better", *signatures])),
        ("data", data(result)),
        ("scale", "1, the whole length" if plan.scale == 1 else f"{plan.scale:g} of the whole length"),
        ("length of a run", result.length),
        ("seeds", seeds),
        ("options of every row", options(table.options) or "the defaults"),
        ("changed in every row", options(plan.changed) or "nothing"),
        ("evaluation", options(table.evaluate)),
        ("for the stand-in data", options(plan.stand_in)),
    ]
    if any(line.outcome.trials for line in result.lines):
        values = options({name: " / ".join(map(str, values)) for name, values in table.sweep.items()})
        tried = f"each value with the first {table.sweep_seeds if table.sweep_seeds > 1 else 'seed'}"
        chosen = f"{tried}, chosen by {HELD_OUT[table.task]} on the held-out set"
        found.append(("sweep", ", ".join(filter(None, [values, chosen]))))
    if table.task == "translation":
        found += _recipes(result)
        found.append(("weights", _weights(result, metrics)))
    return [(name, value) for name, value in found + _software(result) if value]


def settings(result: Result) -> list[str]:
    """What each row and column is made of."""
    table, shown = result.table, [line.cell.row for line in result.lines]
    found = [(name, options(column.options)) for name, column in table.columns.items()]
    for row in (row for row in table.rows if row.run and row.label in shown):
        arch = row.arch if isinstance(row.arch, str) else options(row.arch)
        found.append((row.label, ", ".join(filter(None, [arch, options(row.options)]))))
    return [f"{name}: {made_of}" for name, made_of in found if made_of]


def sweeps(result: Result) -> list[str]:
    """A sentence for each row with a sweep: the values, the chosen one, and whether it lies on the border."""
    found = []
    for line in result.lines:
        trials = line.outcome.trials
        tried = [f"{options(t.swept)}: {t.state if t.value is None else f'{t.value:.3f}'}" for t in trials]
        if tried:
            chosen = f"; chosen {options(line.chosen)}" if line.chosen else "; not decided yet"
            border = f", on the border of the sweep ({', '.join(line.border)})" if line.border else ""
            held_out = HELD_OUT[result.table.task]
            found.append(f"Sweep of {line.cell}, {held_out}: {', '.join(tried)}{chosen}{border}.")
    return found


def unit(line: Line, metric: str) -> str:
    """Of the metric, as the first finished run of ``line`` says; losses have none."""
    return next((each["unit"] for each in line.metrics if each.get("unit") and "loss" not in metric), "")


def _recipes(result: Result) -> list[tuple[str, str]]:
    """train.sh's settings for each corpus as far as they hold for a run, and how those for the table's data differ."""
    found, own = [], result.table.data
    given = [variant.settings for cell in result.plan.cells for variant in cell.variants]
    named = {each.data: recipe_name(each.data) for each in given if each.data in NAMES or Path(each.data).is_dir()}
    for name in dict.fromkeys(named.values()):
        replaced = set.intersection(*(_replaced(each.options) for each in given if named.get(each.data) == name))
        rest = {key: value for key, value in _recipe(name).items() if key not in replaced}
        found.append((f"recipe {name}", options(rest)))
        if result.plan.data and recipe_name(own) != name:
            others = {key: value for key, value in _recipe(recipe_name(own)).items() if _recipe(name).get(key) != value}
            found.append((f"not the recipe {recipe_name(own)}", options(others) or "the same"))
    return found


def _recipe(name: str) -> dict[str, Any]:
    return {"tokens per step": RECIPES[name].tokens, **RECIPES[name].options}


def _replaced(given: Mapping[str, Any]) -> set[str]:
    """What of a recipe a run with the options ``given`` does not have; every run has its own seed."""
    ends, sizes = {"max-update", "max-epoch"}, {"max-tokens", "batch-size"}
    return {"seed", *given, *(ends if ends & set(given) else ()), *(["tokens per step"] if sizes & set(given) else ())}


def _weights(result: Result, metrics: list[Any]) -> str:
    """Which checkpoints were averaged: as evaluate.sh recorded, or as the plan asks for."""
    found = _each(each.get("weights") for each in metrics)
    if not found:
        asked = _each(variant.settings.average for cell in result.plan.cells for variant in cell.variants)
        found = [f"average of the last {count} checkpoints" for count in asked]
    return ", ".join(found if len(found) == 1 else _each(each.partition(":")[0] for each in found))


def _software(result: Result) -> list[tuple[str, str]]:
    """Versions and commits of the finished runs, several where they differ."""
    records = [runs.read(folder) for line in result.lines for folder in line.folders]
    names = dict.fromkeys(name for record in records for name in record.get("versions", {}))
    each_of = {name: " / ".join(_each(each.get("versions", {}).get(name) for each in records)) for name in names}
    commits = " / ".join(_each(_short(record.get("git")) for record in records))
    return [("versions", options(each_of) or "none recorded"), ("commit", commits or "none recorded")]


def _short(commit: Any) -> str:
    commit, plus, _ = str(commit or "").partition("+")
    return commit[:10] + (" with changes" if plus else "")


def _each(values: Iterable[Any]) -> list[str]:
    return [str(value) for value in dict.fromkeys(values) if value]


def data(result: Result) -> str:
    """The data that was trained on, and what it stands in for."""
    here = ", ".join(result.data) or "none"
    return f"{here} in place of {papers_data(result)}" if result.plan.data else here


def papers_data(result: Result) -> str:
    """What the table's file names."""
    return ", ".join(dict.fromkeys(each.data or result.table.data for each in result.table.columns.values()))


def not_it(result: Result) -> str:
    """What a shortened or changed table is called, "" for a whole one."""
    if result.whole:
        return ""
    return "not the paper's experiment" if result.table.source else "not the whole experiment"


def warning(result: Result) -> str:
    """The sentence that keeps these numbers from being taken for the file's; "" where they may stand beside them."""
    if result.whole:
        return ""
    plan, whose = result.plan, "paper's" if result.table.source else "whole one's"
    changes = [f"scale {plan.scale:g}" if plan.scale != 1 else "", data(result) if plan.data else ""]
    listed = ", ".join(filter(None, [*changes, options(plan.changed), options(plan.stand_in)]))
    start = ": ".join(filter(None, [not_it(result).capitalize(), listed]))
    now = f" Run with other settings than {Path(result.table.path).name} has now: {', '.join(result.outdated)}."
    return f"{start}; the values are not comparable with the {whose}.{now if result.outdated else ''}"
