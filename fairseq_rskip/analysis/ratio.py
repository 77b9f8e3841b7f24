"""How much of x and of F(x) is in y, block by block.

It is shown by the ratio x:F, the learned gains and the paper's effective scale. With the statistics
of every G (and gates) held constant, y = a*x + b*F + c. The effective scale that is drawn is the
mean of |a| over examples, positions and features; other readings of that quantity, which the paper
does not define, are printed beside it.
"""

import math
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..norms import NoCoefficients
from ..residual import SkipConnection
from ..residual.adaptive import AdaptiveSkip, lambdas
from . import figures
from .figures import Row
from .probe import Call, Watch, example_mean, example_norm
from .study import Quantity, Study, estimate, in_frame

EFFECTIVE_SCALE = (
    "effective scale = mean |a|, the coefficient of x in y with G's statistics held constant"
)
RATIO = Quantity("ratio", "ratio_standard_error", "x:F in y")
SCALE = Quantity("effective_scale", "effective_scale_standard_error", "effective scale, mean |a|")
LAMBDA = Quantity("lambda", "lambda_standard_error", "adaptive λ")
NUMBER = "{:.4g}".format
MEANS = ("mean", "mean_absolute", "rms", "norm")
# Section 4.3 of Liu et al. (2020) reports this learned effective scale, averaged over the shown
# blocks of 32 features, and defines it nowhere. Of the vector w it does give a norm, 1.34, and its
# size for each feature, 0.24 = 1.34 / √32; so a norm over the features is a reading, too.
PAPER = {"2xSkip+LN": 2.82, "2rSkip+LN": 2.64}


class CoefficientProbe(Watch):
    """Coefficients of every skip connection of ``model`` in a ``with`` block, in float64.

    :meth:`values` gives for each example the means over positions and features of |a|
    (``effective_scale``), |b| (``branch_coefficient``) and a / b (``ratio``), the mean over
    positions of the norm of a over the features, and ``||a * x|| / ||b * F||``. It is empty where y
    is no affine map of x and F: the rule mixes features or streams, or its norm is a tanh.
    """

    @torch.no_grad()
    def see(self, name: str, skip: SkipConnection, call: Call) -> None:
        x, f_x, mask = call.x.double(), call.f_x.double(), call.mask
        try:
            a, b, _ = skip.coefficients(x, f_x, mask)
        except NoCoefficients:
            return
        mean = partial(example_mean, skip, padding_mask=mask)
        skip_part = example_norm(skip, a * x, mask)
        branch_part = example_norm(skip, b * f_x, mask)
        entry = {
            "ratio": mean(a / b),
            "effective_scale": mean(a.abs()),
            "branch_coefficient": mean(b.abs()),
            "skip_part_over_branch_part": skip_part / branch_part,
            "norm_of_a": mean(a.norm(dim=skip.channel_dim, keepdim=True)),
        }
        self.passes[name].append({key: value.cpu() for key, value in entry.items()})


def check_measured(study: Study) -> None:
    """Raise ``UserError`` for a block without coefficients; one batch of each model tells."""
    for label, model, places in study.with_places():
        with CoefficientProbe(model) as probe, torch.no_grad():
            study.losses(model, next(study.batches()))
        for place in places:
            if not probe.values(place["block"]):
                raise UserError(
                    f"{label}: {place['block']} has no x:F: its rule mixes features or carries "
                    "several tensors, or its norm is no affine map of its input"
                )


def report(study: Study, stem: Path) -> None:
    """Measure the models of ``study``; write ``stem``'s CSV after each of them.

    At the end print tables, and write the CSVs of learned vectors and of readings, and the figure.
    Raises as :func:`check_measured`, before any of them is measured.
    """
    rows: list[Row] = []
    learned: list[Row] = []
    readings: list[Row] = []
    check_measured(study)
    for label, model, places in study.with_places():
        with CoefficientProbe(model) as probe, torch.no_grad():
            for batch in study.show_batches(label):
                study.losses(model, batch)
        adapted = lambdas(model)
        of_blocks: list[dict[str, float]] = []
        for place in places:
            skip = probe.skips[place["block"]]
            columns = columns_of(
                probe.values(place["block"]), adapted.get(place["block"], math.nan)
            )
            rows.append({**place, **columns})
            learned += [{**place, **row} for row in learned_vectors(skip)]
            of_blocks.append(readings_of(skip, columns))
        figures.write_csv(Path(f"{stem}.csv"), rows)
        readings += means_of_readings(label, of_blocks)

    drawn = [RATIO, SCALE]
    if any(not math.isnan(row[LAMBDA.column]) for row in rows):
        drawn.append(LAMBDA)
    study.show(rows, drawn, stem, EFFECTIVE_SCALE)
    if learned:
        figures.write_csv(Path(f"{stem}-learned.csv"), learned)
        print(f"\n{text_of_vectors(learned)}\nwritten to {stem}-learned.csv")
    if readings:
        figures.write_csv(Path(f"{stem}-readings.csv"), readings)
        print(f"\n{text_of_readings(readings)}\nwritten to {stem}-readings.csv")


def means_of_readings(label: str, of_blocks: list[dict[str, float]]) -> list[Row]:
    """A row for each reading of a model: its mean over the blocks, and the paper's value."""
    rows = []
    for reading in of_blocks[0]:
        mean = fmean(block[reading] for block in of_blocks)
        row = {"model": label, "reading": reading, "blocks": len(of_blocks), "value": mean}
        rows.append({**row, "paper": PAPER.get(label, math.nan)})
    return rows


def columns_of(scales: dict[str, Tensor], adapted: float) -> Row:
    """The row of one block: means over its examples, and its adapted λ or NaN."""
    columns = {name: float(values.mean()) for name, values in scales.items()}
    for quantity in (RATIO, SCALE):
        _, columns[quantity.error] = estimate(scales[quantity.column])
    return {**columns, LAMBDA.column: adapted, LAMBDA.error: 0.0, "examples": len(scales["ratio"])}


def learned_vectors(skip: SkipConnection) -> list[Row]:
    """A row for every gain G_k.weight and every learned vector of the rule; w is its ``weight``."""
    vectors = {}
    for step, norm in enumerate(skip.post, 1):
        gain = getattr(norm, "weight", None)  # AdaNorm has none
        if gain is not None:
            vectors[f"gain of G_{step}"] = gain
    for name, vector in skip.learned().items():
        vectors["w" if name == "weight" else name] = vector

    rows = []
    for name, vector in vectors.items():
        v = vector.detach().double()
        values = (v.mean(), v.abs().mean(), v.square().mean().sqrt(), v.norm())
        means = dict(zip(MEANS, map(float, values)))
        rows.append({"vector": name, **means, "size": v.numel()})
    return rows


def readings_of(skip: SkipConnection, columns: Row) -> dict[str, float]:
    """Reading of the effective scale that the paper's text allows -> its value in one block.

    a is the coefficient of x in y, w the gain of the norm whose output is y. Readings with w are
    NaN if there is no such gain, for example at an adaptive λ between two steps; readings with λ
    are NaN for a rule without λ.
    """
    skip_lambda = skip.constants().get("lambda", math.nan)
    weight = getattr(_norm_of_y(skip), "weight", None)
    gain = torch.full((1,), math.nan) if weight is None else weight.detach().double()
    return {
        "mean |a|": columns[SCALE.column],
        "norm of a over the features": columns["norm_of_a"],
        "mean λw": float(skip_lambda * gain.mean()),
        "norm of w": float(gain.norm()),
        "norm of λw": float(skip_lambda * gain.norm()),
        "x:F = a/b": columns[RATIO.column],
        "norm of ax / norm of bF": columns["skip_part_over_branch_part"],
    }


def _norm_of_y(skip: SkipConnection) -> nn.Module | None:
    """The norm whose output is y; None if there is none, as at a λ between two steps."""
    norms = list(skip.post)
    if isinstance(skip, AdaptiveSkip):
        steps = skip.effective_lambda()
        if not steps.is_integer():
            return None
        norms = norms[: int(steps)]
    return norms[-1] if norms else None


def text_of_vectors(rows: list[Row]) -> str:
    """The means of learned vectors over the blocks."""
    import pandas

    frame = pandas.DataFrame(rows).groupby(["model", "vector"], sort=False)[[*MEANS]].mean()
    return frame.to_string(float_format=NUMBER, na_rep="")


def text_of_readings(rows: list[Row]) -> str:
    """The readings of the effective scale, by model."""
    import pandas

    cells = [(row["model"], row["reading"], row["value"]) for row in rows]
    frame = in_frame(cells, "reading of the effective scale")
    if PAPER.keys() & set(frame):
        frame.loc["the paper (ResNet-110)"] = pandas.Series(PAPER)
    symbols = "a: coefficient of x in y; w: gain of the norm whose output is y"
    return f"{frame.to_string(float_format=NUMBER, na_rep='')}\n{symbols}"
