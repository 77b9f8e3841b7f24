"""The finished runs of a translation table, row by row: their scores and validation losses."""

import math
from pathlib import Path

import pandas

from fairseq_rskip.analysis.curves import FAIRSEQ, read_log
from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.training_files import CHECKPOINTS

from .finished import FinishedRun, finished_runs

BEST = "best validation loss"
LOSSES = "losses"  # by the number of updates
SCORES = ["sacreBLEU 13a", "chrF", "chrF++", "tokenised BLEU lower-cased"]


def read_runs(folder: Path, updates: list[int]) -> pandas.DataFrame:
    """A line for each evaluated run below ``folder``: its label, learning rate, seed and values.

    The values are the scores, the best validation loss, all validation losses, and those at the
    validations nearest to ``updates``. Raises ``UserError`` for a run with several evaluations.
    """
    lines = []
    for run in finished_runs(folder):
        if not run.scores:
            continue
        line = {"label": run.label, "lr": run.options.get("lr"), "seed": run.seed}
        lines.append({**line, **values_of(run, updates)})
    return pandas.DataFrame(lines)


def values_of(run: FinishedRun, updates: list[int]) -> dict[str, object]:
    """The values of one run, by their names. Raises ``UserError`` for several evaluations."""
    if len(run.scores) > 1:
        names = ", ".join(run.scores)
        raise UserError(f"{run.folder} has the evaluations {names}; expected one")
    (scores,) = run.scores.values()
    losses = validation_losses(run)
    values: dict[str, object] = {name: scores.get(name, math.nan) for name in SCORES}
    values |= {BEST: run.values["valid_loss"], LOSSES: losses}
    for update in updates if len(losses) else []:
        values[f"validation loss near update {update:,}"] = loss_near(losses, update)
    return values


def loss_near(losses: pandas.Series, update: int) -> float:
    """The loss at the validation nearest to ``update``; NaN for a run that stopped before it."""
    nearest = min(losses.index, key=lambda at: abs(at - update))
    interval = losses.index.to_series().diff().max()  # NaN for a single validation
    is_near = update <= nearest or update - nearest <= interval / 2
    if not is_near:
        return math.nan
    return float(losses[nearest])


def validation_losses(run: FinishedRun) -> pandas.Series:
    """The validation losses in bits, by the number of updates.

    Empty where the record is kept without its log.
    """
    log = run.folder / CHECKPOINTS / FAIRSEQ.log
    return pandas.Series(read_log(log, FAIRSEQ).get("valid_loss", {}), dtype=float)


def runs_of(runs: pandas.DataFrame, name: str) -> pandas.DataFrame:
    """The lines of a row by seed; ``name`` is its label, or LABEL@RATE. Raises ``UserError``."""
    label, _, rate = name.partition("@")
    chosen = runs[runs["label"] == label] if len(runs) else runs
    if rate and len(chosen):
        chosen = chosen[chosen["lr"] == _rate(rate, name)]
    if chosen.empty:
        raise UserError(f"there is no finished run of {name!r}; expected a row's label")
    if chosen["lr"].nunique(dropna=False) > 1:
        rates = [f"{lr:g}" for lr in sorted(chosen["lr"].dropna().unique())]
        expected = f"{label}@RATE"
        if chosen["lr"].hasnans:
            rates.append("the recipe's")
            expected += ", or a folder with those at the recipe's alone"
        raise UserError(f"{name!r} has runs at the rates {', '.join(rates)}; expected {expected}")
    if chosen["seed"].duplicated().any():
        raise UserError(
            f"{name!r} has several runs of one seed, in columns or with other options; expected "
            "the folder of one of them"
        )
    return chosen.drop(columns=["label", "lr"]).set_index("seed")


def _rate(text: str, name: str) -> float:
    """The number behind @ in ``name``. Raises ``UserError`` for no number."""
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{name!r}: {text!r} is no learning rate; expected LABEL@RATE") from None
