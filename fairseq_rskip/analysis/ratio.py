"""How much of x and of F(x) is in y, block by block: the ratio x:F, learned gains, the paper's effective scale.

With the statistics of every G (and gates) held constant, y = a*x + b*F + c. The ratio a:b is measured by a probe, and
by the closed form of appendix A; both must agree. The effective scale that is drawn is the mean of |a| over examples,
positions and features; every other reading of that quantity, which the paper does not define, is printed beside it.
"""

import math
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from ..console import print_line
from ..errors import UserError
from ..residual import SkipConnection
from ..residual.adaptive import lambdas
from . import figures
from .coefficients import coefficients, skip_ratio
from .figures import Row, select
from .probe import Watch, example_mean, example_norm, without_padding
from .study import Quantity, Study, draw, estimate, table

TOLERANCE = 1e-9  # of float64, with room for sums that cancel
EFFECTIVE_SCALE = "effective scale = mean |a|, the coefficient of x in y with G's statistics held constant"
RATIO = Quantity("ratio", "ratio_standard_error", "x:F in y")
SCALE = Quantity("effective_scale", "effective_scale_standard_error", "effective scale, mean |a|")
LAMBDA = Quantity("lambda", "lambda_standard_error", "adaptive λ")
NORM = "norm_of_a"
# Section 4.3 of Liu et al. (2020) reports this learned effective scale, averaged over the shown blocks of 32 features,
# and defines it nowhere. Of the vector w it does give a norm, 1.34, and its size for each feature, 0.24 = 1.34 / √32;
# so a norm over the features is a reading, too.
PAPER = {"2xSkip+LN": 2.82, "2rSkip+LN": 2.64}
Scales = dict[str, Tensor]


class CoefficientProbe(Watch):
    """Coefficients of every skip connection below ``model`` in the forward passes of a ``with`` block, in float64.

    :meth:`scales` gives for each example the means over positions and features of |a| (``effective_scale``), |b|
    (``branch_coefficient``), a / b (``ratio``) and ``skip_ratio`` (``ratio_closed_form``), the mean over positions of
    the norm of a over the features, and ``||a * x|| / ||b * F||``; for each batch the largest relative difference
    between a / b and the closed form at any position and feature, and the largest difference between the real output
    and ``a*x + b*F + c``, relative to the largest value of that output.
    """

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self._batches: dict[str, list[Scales]] = {name: [] for name in self.skips}

    def scales(self, name: str) -> Scales | None:
        """Return what was measured at the skip connection ``name``; None where y is no affine map of x and F: its rule
        mixes features or streams, or its norm is a tanh."""
        batches = self._batches[name]
        return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]} if batches else None

    @torch.no_grad()
    def see(
        self, name: str, skip: SkipConnection, x: Tensor, f_x: Tensor, padding_mask: Tensor | None, y: Tensor
    ) -> None:
        x, f_x, y = x.double(), f_x.double(), y.double()
        try:
            a, b, c = coefficients(skip, x, f_x, padding_mask)
        except ValueError:
            return

        def mean(values: Tensor) -> Tensor:
            return example_mean(skip, values, padding_mask)

        def largest(values: Tensor) -> Tensor:
            return without_padding(skip, values, padding_mask).abs().max().reshape(1)

        closed = skip_ratio(skip, x, f_x, padding_mask)
        # 0 or infinity twice is no difference
        apart = torch.where(a / b == closed, torch.zeros_like(closed), (a / b - closed) / closed)
        parts = example_norm(skip, a * x, padding_mask) / example_norm(skip, b * f_x, padding_mask)
        found = {
            "ratio": mean(a / b),
            "ratio_closed_form": mean(closed),
            "largest_relative_difference": largest(apart),
            "effective_scale": mean(a.abs()),
            "branch_coefficient": mean(b.abs()),
            "skip_part_over_branch_part": parts,
            "largest_output_difference": largest(a * x + b * f_x + c - y) / largest(y),
            NORM: mean(a.expand_as(x).norm(dim=skip.channel_dim, keepdim=True)),
        }
        self._batches[name].append({key: value.cpu() for key, value in found.items()})


def report(study: Study, stem: Path) -> None:
    """Measure the models of ``study``, write ``stem``'s CSV after each of them, at the end print tables and write the
    CSVs of learned vectors and of readings, and the figure."""
    learned: list[Row] = []
    readings: list[Row] = []

    def measure(label: str, model: nn.Module, places: list[Row]) -> list[Row]:
        with CoefficientProbe(model) as probe, torch.no_grad():
            for batch in study.show_batches(label):
                study.losses(model, batch)
        blocks, adapted = [place["block"] for place in places], lambdas(model)
        measured = [columns_of(label, block, probe.scales(block), adapted.get(block)) for block in blocks]
        learned.extend(row for place in places for row in learned_vectors(place, probe.skips[place["block"]]))
        values = [readings_of(probe.skips[block], probe.scales(block)) for block in blocks]
        for reading in values[0]:
            row = {"model": label, "reading": reading, "blocks": len(blocks)}
            mean = fmean(each[reading] for each in values)
            readings.append({**row, "value": mean, "paper": PAPER.get(label, math.nan)})
        return measured

    rows = study.measure(measure, stem)
    written = {ending: found for ending, found in (("-learned", learned), ("-readings", readings)) if found}
    for ending, found in written.items():
        figures.write_csv(figures.beside(stem, f"{ending}.csv"), found)
    drawn = [RATIO, SCALE, *([LAMBDA] if any(not math.isnan(row["lambda"]) for row in rows) else [])]
    for quantity in drawn:
        print(table(rows, quantity.column, f"{quantity.title.partition(',')[0]}, mean over {study.data}") + "\n")
    print(EFFECTIVE_SCALE)
    for label in study.models:
        _print_model(label, select(rows, model=label), select(learned, model=label))
    print("\n" + readings_text(readings))
    figures.save(draw(rows, drawn, study.data, EFFECTIVE_SCALE), stem)
    print(f"written to {', '.join(f'{stem}{ending}.csv' for ending in ('', *written))}, {stem}.png and {stem}.pdf")


def columns_of(model: str, block: str, scales: Scales | None, adapted: float | None) -> Row:
    """What is measured of one block. Raises ``UserError`` for one that has no x:F."""
    if scales is None:
        why = "its rule mixes features or carries several tensors, or its norm is no affine map of its input"
        raise UserError(f"{model}: {block} has no x:F: {why}")
    columns: Row = {}
    for name, values in scales.items():
        if name.startswith("largest"):
            columns[name] = float(values.max())
        elif name != NORM:
            columns[name] = float(values.mean())
        if name in (RATIO.column, SCALE.column):
            columns[f"{name}_standard_error"] = estimate(values)[1]
    adaptive = {"lambda": math.nan if adapted is None else adapted, "lambda_standard_error": 0.0}
    return {**columns, **adaptive, "examples": len(scales["ratio"])}


def learned_vectors(place: Row, skip: SkipConnection) -> list[Row]:
    """Every gain G_k.weight and every w of wskip: its mean, mean absolute value, root mean square, norm."""
    vectors = {f"gain of G_{step}": norm.weight for step, norm in enumerate(skip.post, 1)}
    vectors.update({"w" if name == "weight" else name: vector for name, vector in skip.learned().items()})
    rows = []
    for name, vector in vectors.items():
        v = vector.detach().double()
        means = {"mean": v.mean(), "mean_absolute": v.abs().mean(), "rms": v.square().mean().sqrt(), "norm": v.norm()}
        rows.append({**place, "vector": name, **{key: float(m) for key, m in means.items()}, "size": v.numel()})
    return rows


def readings_of(skip: SkipConnection, scales: Scales) -> dict[str, float]:
    """Every reading of the effective scale that the paper's text allows -> its value at one skip connection.

    a is the coefficient of x in y, w the gain of the norm that y leaves, C the number of features. The gain's readings
    are NaN for a skip without one, as of an adaptive one between two steps, those with λ for a rule that has none.
    """
    norms, adapted = list(skip.post), lambdas(skip).get("")
    if adapted is not None:  # y leaves one step's norm only at an integer
        norms = norms[: int(adapted)] if adapted.is_integer() else []
    gain = getattr(norms[-1], "weight", None) if norms else None
    gain = torch.full((1,), math.nan) if gain is None else gain.detach().double()
    weight = float(getattr(skip.options, "skip_lambda", math.nan)) if adapted is None else adapted
    means = {name: float(values.mean()) for name, values in scales.items()}
    return {
        "mean |a|": means["effective_scale"],
        "norm of a over the features": means[NORM],
        "norm of a / √C": means[NORM] / math.sqrt(skip.dim),
        "mean w": float(gain.mean()),
        "mean λw": float(weight * gain.mean()),
        "norm of w": float(gain.norm()),
        "norm of λw": float(weight * gain.norm()),
        "norm of λw / √C": float(weight * gain.norm() / math.sqrt(skip.dim)),
        "x:F = a/b": means["ratio"],
        "norm of ax / norm of bF": means["skip_part_over_branch_part"],
    }


def readings_text(rows: list[Row]) -> str:
    """A line for each reading, a column for each model."""
    labels = list(dict.fromkeys(row["model"] for row in rows))
    lines = [["reading of the effective scale", *labels]]
    for reading in dict.fromkeys(row["reading"] for row in rows):
        lines.append([reading, *(f"{row['value']:.3f}" for row in select(rows, reading=reading))])
    if any(label in PAPER for label in labels):
        lines.append(["the paper (ResNet-110)", *(str(PAPER.get(label, "")) for label in labels)])
    return figures.aligned(lines)


def _print_model(label: str, rows: list[Row], learned: list[Row]) -> None:
    """How well the two ratios agree, and the means of what is learned."""
    worst = max(rows, key=lambda row: row["largest_relative_difference"])
    apart = worst["largest_relative_difference"]
    print(f"{label}: closed form and probe differ by {apart:.1e} at most (relative, float64)")
    if not apart <= TOLERANCE:
        print_line(f"note: {label}: closed form and probe disagree at {worst['block']}", "stderr")
    for vector in dict.fromkeys(row["vector"] for row in learned):
        mine = select(learned, vector=vector)
        measures = ("mean", "mean_absolute", "rms", "norm")
        means = [f"{key.replace('_', ' ')} {fmean(row[key] for row in mine):.4g}" for key in measures]
        print(f"{label}: {vector} over {len(mine)} blocks: {', '.join(means)}")
