"""A table of the report as text and as a record of CSV, and what stands around it."""

import re
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import pandas

from fairseq_rskip.tools.experiments.plan import described, read
from fairseq_rskip.tools.experiments.records import Result, Table, dashed
from fairseq_rskip.tools.experiments.tasks import TASKS
from fairseq_rskip.tools.significance import LEVEL

from .compare import missing, test_of

MINUS = "\u2212"


def frame(table: Table, lines: list[Result], whole: bool) -> pandas.DataFrame:
    """The table as text; a column in which no row has anything is left out."""
    bases = list({line.baseline for line in lines if line.baseline})
    shown = pandas.DataFrame([_texts(table, line, bases[0] if len(bases) == 1 else "its baseline", whole) for line in lines])
    shown["column"] = shown["column"].mask(shown["column"].duplicated(), "")
    return shown.loc[:, (shown != "").any()]


def _texts(table: Table, line: Result, base: str, whole: bool) -> dict[str, str]:
    digits, reported, records = digits_of(table.metric), line.cell.reported, [line.records[seed] for seed in line.values]
    ours = spread(list(line.values.values()), digits)
    done = f"{len(line.values)} of {len(line.runs)}" if len(line.values) < len(line.runs) else str(len(line.runs) or "")
    minus_paper = line.mean - reported if line.values and reported is not None and whole else None
    return {
        "column": line.cell.column,
        "row": line.cell.row.label,
        "equation": line.cell.row.equation,
        table.metric: f"**{ours}**" if line.best else ours or missing(line)[1] or "quoted",
        "n": done,
        **{name: spread(line.also(name), digits_of(name)) for name in table.also},
        "length ratio": _mean(records, "length_ratio", "{:.3f}"),
        "parameters": _mean(records, "parameters", "{:,.0f}"),
        "seconds": _mean(records, "seconds", "{:,.0f}"),
        "chosen": listed(line.chosen),
        "published": "" if reported is None else f"{reported:.{digits}f}",
        f"{MINUS} published": signed(minus_paper, digits),
        f"{MINUS} {base}": signed(line.difference, digits) if line.baseline else "baseline" * line.is_baseline,
        "p": _p_values(line.p, False) or line.untested.replace("needs 2 seeds", "one seed"),
        "p, Holm": _p_values(line.adjusted, True),
    }


def _mean(records: list[dict[str, Any]], name: str, form: str) -> str:
    values = [record[name] for record in records if record.get(name) is not None]
    return form.format(statistics.fmean(values)) if values else ""


def digits_of(metric: str) -> int:
    """After the point: rules differ by hundredths of a loss."""
    return 3 if "loss" in metric else 2


def spread(values: list[float], digits: int) -> str:
    """The mean of ``values``, and their standard deviation if there are several."""
    text = f"{statistics.fmean(values):.{digits}f}" if values else ""
    return text + (f" \u00b1 {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def signed(value: float | None, digits: int) -> str:
    text = "" if value is None else f"{value:+.{digits}f}"
    return (text.lstrip("+-") if text and float(text) == 0 else text).replace("-", MINUS)


def _p_values(p: Mapping[str, float], mark: bool) -> str:
    """One after the other in the order of seeds, which are named; ``mark`` those below 0.05."""
    texts = [f"seed {s}: " * bool(s) + ("< 0.001" if v < 0.001 else f"{v:.3f}") + " *" * (mark and v < LEVEL) for s, v in p.items()]
    return ", ".join(texts)


def listed(options: Mapping[str, Any]) -> str:
    """Names and values in a row."""
    return ", ".join(f"{name} {value}" for name, value in options.items())


def each(values: Iterable[Any]) -> str:
    """Different ``values`` in a row."""
    return " / ".join(dict.fromkeys(str(value) for value in values if value))


def facts(table: Table, lines: list[Result]) -> dict[str, str]:
    """What the numbers were made with, and what each column and row is made of."""
    task, runs = TASKS[table.task], [run for cell in table.cells for _, run in cell.variants]
    measured = [line.records[seed] for line in lines for seed in line.values]
    records = [read(folder) for line in lines for folder in line.folders]
    tried = {name: each(values) for name, values in dashed(table.sweep).items()}
    rows = {line.cell.row.label: line.cell for line in lines if line.cell.run}
    found = {
        "metric": f"{table.metric}, {'lower' if task.metrics[table.metric] else 'higher'} is better",
        "signature": each(record.get("signatures", {}).get(table.metric) for record in measured),
        "data": each(run.identity["data"] for run in runs),
        "length of a run": each(f"{run.length:,} {run.unit}" for run in runs),
        "seeds": ", ".join(map(str, table.seeds)),
        "options of every row": listed({**dashed(table.options), **table.changed}),
        "evaluation": listed(table.evaluate),
        "sweep": f"{listed(tried)}; the best {task.held_out} of {len(table.tried)} seed(s)" if tried else "",
        "weights": each(str(record.get("weights") or "").partition(":")[0] for record in measured),
        "versions": each(f"{k} {v}" for record in records for k, v in record.get("versions", {}).items()),
        "commit": each((record.get("git") or "")[:10] for record in records),
        **{f"column {name}": listed(column.options) for name, column in table.columns.items()},
        **{label: ", ".join(filter(None, [cell.arch, listed(cell.row.options)])) for label, cell in rows.items()},
    }
    return {name: value for name, value in found.items() if value}


def notes(table: Table, lines: list[Result]) -> list[str]:
    """What the table has no room for: missing seeds, rows without runs, the values of sweeps."""
    shown, found = {str(line.cell) for line in lines}, []
    idle = [str(cell) for cell in table.cells if cell.run and str(cell) not in shown]
    found += [f"{line.cell}: {missing(line)[0]}." for line in lines if missing(line)[0]]
    found += [f"Not run yet: {', '.join(idle) if len(idle) < 9 else f'{len(idle)} cells'}."] if idle else []
    for line in lines:
        tried = ", ".join(f"{listed(swept)}: {state if v is None else f'{v:.3f}'}" for swept, v, state in line.trials)
        found += [f"Sweep of {line.cell}, {TASKS[table.task].held_out}: {tried}; {_chosen(line)}."] if tried else []
    return found


def _chosen(line: Result) -> str:
    """What a sweep has chosen, and whether that is the smallest or largest value: the best may lie beyond."""
    border = ""
    for option, value in line.chosen.items():
        values = [swept[option] for swept, *_ in line.trials]
        if all(isinstance(v, int | float) for v in values) and value in (min(values), max(values)):
            border = ", on the border of the sweep"
    return f"chosen {listed(line.chosen)}{border}" if line.chosen else "not decided yet"


def record(table: Table, line: Result) -> dict[str, Any]:
    """A row of the CSV file, with every digit."""
    name, scale, data, changed = described(table)
    runs = [run for cell in table.cells for _, run in cell.variants]
    reported, whole = line.cell.reported, not data and not changed and scale == 1
    swept = [f"{listed(swept)}: {state if value is None else repr(value)}" for swept, value, state in line.trials]
    also = {metric: statistics.fmean(values) if (values := line.also(metric)) else None for metric in table.also}
    return {
        "plan": name,
        "table": table.name,
        "column": line.cell.column,
        "row": line.cell.row.label,
        "equation": line.cell.row.equation,
        "metric": table.metric,
        "papers_experiment": whole and bool(table.source),
        "data": each(run.identity["data"] for run in runs),
        "scale": scale,
        "length": each(f"{run.length:,} {run.unit}" for run in runs),
        "changed": listed(changed),
        "outdated": False,  # a column of earlier reports
        "swept": "; ".join(swept),
        "chosen": listed(line.chosen),
        "seeds_planned": len(table.seeds) if line.cell.run else 0,
        "seeds_done": len(line.values),
        "values_by_seed": _by_seed(line.values),
        "mean": line.mean,
        "standard_deviation": line.deviation,
        **also,
        "state": missing(line)[0] or ("done" if line.values else "quoted"),
        "paper": reported,
        "papers_data": line.cell.data,
        "ours_minus_paper": line.mean - reported if line.values and whole and reported is not None else None,
        "baseline": line.baseline,
        "ours_minus_baseline": line.difference,
        "test": ("over seeds" if test_of(table) == "welch" else "on the test set") if line.p else line.untested,
        "untested": line.untested if line.p else "",
        "p": _by_seed(line.p),
        "p_holm": _by_seed(line.adjusted),
    }


def _by_seed(values: Mapping[Any, float]) -> str:
    return " ".join(f"{seed}:{value!r}" if seed != "" else repr(value) for seed, value in values.items())


def markdown(text: Any) -> str:
    """One line of text for Markdown, in and out of tables; a value that is bold stays bold."""
    return re.sub(r"([\\`_\[\]|$~#<]|(?<!\*)\*(?!\*))", r"\\\1", " ".join(str(text).split()))
