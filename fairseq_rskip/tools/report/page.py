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


def frame(table: Table, lines: list[Result]) -> pandas.DataFrame:
    """The table as text; a column in which no row has anything is left out."""
    bases = {line.baseline for line in lines if line.baseline}
    base = f"{MINUS} {bases.pop() if len(bases) == 1 else 'its baseline'}"
    shown = pandas.DataFrame([_texts(table, line, base) for line in lines])
    shown["column"] = shown["column"].mask(shown["column"].duplicated(), "")
    return shown.loc[:, (shown != "").any()]


def _texts(table: Table, line: Result, base: str) -> dict[str, str]:
    digits, records = digits_of(table.metric), [line.records[seed] for seed in line.values]
    ours, count = (
        spread([*line.values.values()], digits),
        f"{len(line.values)} of " * (line.runs.keys() != line.values.keys()),
    )
    reported, (_, scale, data, changed) = line.cell.reported, described(table)
    comparable = line.values and reported is not None and not data and not changed and scale == 1
    about = {"column": line.cell.column, "row": line.cell.row.label, "equation": line.cell.row.equation}
    about[table.metric] = f"**{ours}**" if line.best else ours or missing(line)[1] or "quoted"
    about["n"] = f"{count}{len(line.runs)}" if line.runs else ""
    about |= {name: spread(line.also(name), digits_of(name)) for name in table.also}
    for name, form in (("length_ratio", "{:.3f}"), ("parameters", "{:,.0f}"), ("seconds", "{:,.0f}")):
        values = [record[name] for record in records if record.get(name) is not None]
        about[name.replace("_", " ")] = form.format(statistics.fmean(values)) if values else ""
    about |= {"chosen": listed(line.chosen), "published": "" if reported is None else f"{reported:.{digits}f}"}
    about[f"{MINUS} published"] = signed(line.mean - reported, digits) if comparable else ""
    about[base] = signed(line.difference, digits) if line.baseline else "baseline" * line.is_baseline
    about["p"] = _p_values(line.p, False) or line.untested.replace("needs 2 seeds", "one seed")
    return {**about, "p, Holm": _p_values(line.adjusted, True)}


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
    texts = {seed: ("< 0.001" if v < 0.001 else f"{v:.3f}") + " *" * (mark and v < LEVEL) for seed, v in p.items()}
    return ", ".join(f"seed {seed}: " * bool(seed) + text for seed, text in texts.items())


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
    sweep = listed({name: each(values) for name, values in dashed(table.sweep).items()})
    found = {
        "metric": f"{table.metric}, {'lower' if task.metrics[table.metric] else 'higher'} is better",
        "signature": each(record.get("signatures", {}).get(table.metric) for record in measured),
        "data": each(run.identity["data"] for run in runs),
        "length of a run": each(f"{run.length:,} {run.unit}" for run in runs),
        "seeds": ", ".join(map(str, table.seeds)),
        "options of every row": listed({**dashed(table.options), **table.changed}),
        "evaluation": listed(table.evaluate),
        "sweep": f"{sweep}; the best {task.held_out} of seeds {table.tried}" if sweep else "",
        "weights": each(str(record.get("weights") or "").partition(":")[0] for record in measured),
        "versions": each(f"{k} {v}" for record in records for k, v in record.get("versions", {}).items()),
        "commit": each((record.get("git") or "")[:10] for record in records),
    }
    found |= {f"column {name}": listed(column.options) for name, column in table.columns.items()}
    found |= {x.cell.row.label: f"{x.cell.arch} {listed(x.cell.row.options)}".strip() for x in lines if x.cell.run}
    return {name: value for name, value in found.items() if value}


def notes(table: Table, lines: list[Result]) -> list[str]:
    """What the table has no room for: missing seeds, rows without runs, the values of sweeps."""
    shown, found = {str(line.cell) for line in lines}, []
    idle = [str(cell) for cell in table.cells if cell.run and str(cell) not in shown]
    found += [f"{line.cell}: {missing(line)[0]}." for line in lines if missing(line)[0]]
    found += [f"Not run yet: {', '.join(idle) if len(idle) < 9 else f'{len(idle)} cells'}."] if idle else []
    for line in lines:
        tried = ", ".join(f"{listed(swept)}: {how if v is None else f'{v:.3f}'}" for swept, v, how in line.trials)
        chosen = f"chosen {listed(line.chosen)}" if line.chosen else "not decided yet"
        for option, value in line.chosen.items():
            values = [swept[option] for swept, *_ in line.trials]
            if value in (values[0], values[-1]):  # the best may lie beyond
                chosen += ", at the end of the sweep"
        found += [f"Sweep of {line.cell}, {TASKS[table.task].held_out}: {tried}; {chosen}."] if tried else []
    return found


def record(table: Table, line: Result) -> dict[str, Any]:
    """A row of the CSV file, with every digit. Its columns are those of earlier reports."""
    name, scale, data, changed = described(table)
    runs, reported = [run for cell in table.cells for _, run in cell.variants], line.cell.reported
    whole = not data and not changed and scale == 1
    deviation = statistics.stdev(line.values.values()) if len(line.values) > 1 else None
    swept = "; ".join(f"{listed(swept)}: {how if value is None else repr(value)}" for swept, value, how in line.trials)
    minus = line.mean - reported if line.values and whole and reported is not None else None
    test = "over seeds" if test_of(table) == "welch" else "on the test set"
    found = {"plan": name, "table": table.name, "column": line.cell.column, "row": line.cell.row.label}
    found |= {"equation": line.cell.row.equation, "metric": table.metric}
    found |= {"papers_experiment": whole and bool(table.source), "data": each(run.identity["data"] for run in runs)}
    found |= {"scale": scale, "length": each(f"{run.length:,} {run.unit}" for run in runs), "changed": listed(changed)}
    found |= {"outdated": False, "swept": swept, "chosen": listed(line.chosen)}
    found |= {"seeds_planned": len(table.seeds) if line.cell.run else 0, "seeds_done": len(line.values)}
    found |= {"values_by_seed": _by_seed(line.values), "mean": line.mean, "standard_deviation": deviation}
    found |= {metric: statistics.fmean(values) if (values := line.also(metric)) else None for metric in table.also}
    found |= {"state": missing(line)[0] or ("done" if line.values else "quoted"), "paper": reported}
    found |= {"papers_data": line.cell.data, "ours_minus_paper": minus}
    found |= {"baseline": line.baseline, "ours_minus_baseline": line.difference}
    found |= {"test": test if line.p else line.untested, "untested": line.untested if line.p else ""}
    return found | {"p": _by_seed(line.p), "p_holm": _by_seed(line.adjusted)}


def _by_seed(values: Mapping[Any, float]) -> str:
    return " ".join(f"{seed}:{value!r}" if seed != "" else repr(value) for seed, value in values.items())


def markdown(text: Any) -> str:
    """One line of text for Markdown, in and out of tables; a value that is bold stays bold."""
    return re.sub(r"([\\`_\[\]|$~#<]|(?<!\*)\*(?!\*))", r"\\\1", " ".join(str(text).split()))
