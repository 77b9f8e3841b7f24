"""The tables of a report as records of CSV."""

import json
import statistics
from collections.abc import Mapping
from typing import Any

from fairseq_rskip.tools.experiments.changes import Changes, changes_of
from fairseq_rskip.tools.experiments.records import Experiment, Result

from .comparison import missing, test_of
from .sweep import listed
from .tables import distinct_text, minus_published, outcome


def records(experiment: Experiment, results: list[Result]) -> list[dict[str, Any]]:
    """The rows of the CSV file, with every digit.

    Their columns are those of earlier reports. ``swept``, ``chosen`` and ``values_by_seed`` are
    JSON.
    """
    changes = changes_of(experiment)
    return [_record(experiment, result, changes) for result in results]


def _record(experiment: Experiment, result: Result, changes: Changes) -> dict[str, Any]:
    """A row of the CSV file."""
    runs = [trial.run for trial in result.cell.trials]
    swept = []
    for trial in result.trials:
        value = outcome(trial) if trial.held_out is None else trial.held_out
        swept.append({"options": trial.values, "result": value})
    cells = {
        "plan": changes.name(experiment),
        "table": experiment.name,
        "column": result.cell.column,
        "row": result.cell.row.label,
        "equation": result.cell.row.equation,
        "metric": experiment.metric,
        "papers_experiment": changes.are_none and bool(experiment.table.source),
        "data": distinct_text(run.identity["data"] for run in runs),
        "scale": changes.length,
        "length": distinct_text(f"{run.length:,} {run.unit}" for run in runs),
        "changed": listed(changes.options),
        "swept": json.dumps(swept, ensure_ascii=False),
        "chosen": json.dumps(result.chosen, ensure_ascii=False),
        "seeds_planned": len(experiment.seeds_of(result.cell.row)) if result.cell.run else 0,
        "seeds_done": len(result.values),
        "values_by_seed": json.dumps(result.values),
        "mean": result.mean,
        "standard_deviation": (
            statistics.stdev(result.values.values()) if len(result.values) > 1 else None
        ),
    }
    for metric in experiment.table.also:
        values = result.also(metric)
        cells[metric] = statistics.fmean(values) if values else None
    cells |= {
        "state": missing(result)[0] or ("done" if result.values else "quoted"),
        "paper": result.cell.reported,
        "papers_data": result.cell.data,
        "ours_minus_paper": minus_published(result) if changes.are_none else None,
    }
    return cells | _comparison_cells(experiment, result)


def _comparison_cells(experiment: Experiment, result: Result) -> dict[str, Any]:
    """The columns of a row that compare it with its baseline."""
    comparison = result.comparison
    names = ["baseline", "ours_minus_baseline", "low", "high", "test", "untested", "p", "p_holm"]
    cells: dict[str, Any] = dict.fromkeys([*names, "shared_seeds", "tests"])
    cells["baseline"] = ""
    if comparison is None:
        return cells
    by_seed = test_of(experiment) == "seeds"
    cells["baseline"] = comparison.baseline
    cells["ours_minus_baseline"] = comparison.difference
    if comparison.interval:
        cells["low"], cells["high"] = comparison.interval
    cells["untested"] = comparison.untested
    if comparison.p:
        cells["test"] = "by seed" if by_seed else "on the test set"
        cells["shared_seeds"], cells["tests"] = comparison.seeds, comparison.tests
    cells["p"], cells["p_holm"] = _by_seed(comparison.p), _by_seed(comparison.adjusted)
    return cells


def _by_seed(values: Mapping[Any, float]) -> str:
    texts = [f"{seed}:{value!r}" if seed != "" else repr(value) for seed, value in values.items()]
    return " ".join(texts)
