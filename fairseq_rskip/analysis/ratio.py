"""How much of x and of F(x) is in y, block by block: the ratio x:F, learned gains, the paper's effective scale.

With the statistics of every G (and gates) held constant, y = a*x + b*F + c. The ratio a:b is measured by a probe, and
by the closed form of appendix A; both must agree. The effective scale that is drawn is the mean of |a| over examples,
positions and features; every other reading of that quantity, which the paper does not define, is printed beside it.
"""

import math
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

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
# Section 4.3 of Liu et al. (2020) reports this learned effective scale, averaged over the shown blocks of 32 features,
# and defines it nowhere. Of the vector w it does give a norm, 1.34, and its size for each feature, 0.24 = 1.34 / √32;
# so a norm over the features is a reading, too.
MEASURES = ("mean", "mean_absolute", "rms", "norm")  # of a learned vector
PAPER = {"2xSkip+LN": 2.82, "2rSkip+LN": 2.64}


class Scales(NamedTuple):
    """What :class:`CoefficientProbe` found at one skip connection, in float64.

    Of each example the means over positions and features of ``|a|``, ``|b|``, ``a / b`` and of ``skip_ratio``
    (``closed_form``); ``norm``, the mean over positions of the norm of a over the features; ``parts``, ``||a * x|| /
    ||b * F||``. Of each batch ``difference``, the largest relative difference between a / b and the closed form at any
    position and feature; ``mismatch``, the largest difference between the real output and ``a*x + b*F + c``, relative
    to the largest value of that output.
    """

    a: Tensor
    b: Tensor
    ratio: Tensor
    closed_form: Tensor
    norm: Tensor
    parts: Tensor
    difference: Tensor
    mismatch: Tensor


class CoefficientProbe(Watch):
    """Coefficients of every skip connection below ``model`` in the forward passes of a ``with`` block.

    Most skip connections are an elementwise affine map for a given input; :func:`.coefficients.coefficients` knows it.
    Kinds and norms that are no such map (they mix features or streams, or are a tanh) are left out.
    """

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self._batches: dict[str, list[Scales]] = {name: [] for name in self.skips}

    def scales(self, name: str) -> Scales | None:
        """What was found at the skip connection ``name``, all batches one after another; None for no such map."""
        batches = self._batches[name]
        return Scales(*map(torch.cat, zip(*batches))) if batches else None

    @torch.no_grad()
    def see(
        self, name: str, skip: SkipConnection, x: Tensor, f_x: Tensor, padding_mask: Tensor | None, y: Tensor
    ) -> None:
        x, f_x, y = x.double(), f_x.double(), y.double()
        try:
            a, b, c = coefficients(skip, x, f_x, padding_mask)
        except ValueError:
            return
        closed = skip_ratio(skip, x, f_x, padding_mask)
        norm = a.expand_as(x).norm(dim=skip.channel_dim, keepdim=True)
        means = [example_mean(skip, each, padding_mask) for each in (a.abs(), b.abs(), a / b, closed, norm)]
        parts = example_norm(skip, a * x, padding_mask) / example_norm(skip, b * f_x, padding_mask)
        # 0 or infinity twice is no difference
        apart = torch.where(a / b == closed, torch.zeros_like(closed), (a / b - closed) / closed)
        difference, error, largest = (
            _largest(each, skip, padding_mask) for each in (apart, a * x + b * f_x + c - y, y)
        )
        found = Scales(*means, parts, difference, error / largest)
        self._batches[name].append(Scales(*(value.cpu() for value in found)))


def _largest(values: Tensor, skip: SkipConnection, padding_mask: Tensor | None) -> Tensor:
    """The largest absolute value at an unpadded position, ``(1,)``."""
    return without_padding(skip, values, padding_mask).abs().max().reshape(1)


def report(study: Study, stem: Path) -> None:
    """Measure the models of ``study``, write ``stem``'s CSV after each of them, at the end print tables and write the
    CSVs of learned vectors and of readings, and the figure."""
    learned: list[Row] = []
    readings: list[Row] = []

    def measure(label: str, model: nn.Module, places: list[Row]) -> list[Row]:
        with CoefficientProbe(model) as probe, torch.no_grad():
            for batch in study.show_batches(label):
                study.losses(model, batch)
        found = [probe.scales(place["block"]) for place in places]
        adapted = lambdas(model)
        measured = [columns_of(place, scales, adapted.get(place["block"])) for place, scales in zip(places, found)]
        skips = [probe.skips[place["block"]] for place in places]
        learned.extend(row for place, skip in zip(places, skips) for row in learned_vectors(place, skip))
        readings.extend(readings_rows(label, skips, found))
        return measured

    rows = study.measure(measure, stem)
    written = {"-learned.csv": learned, "-readings.csv": readings}
    written = {ending: found for ending, found in written.items() if found}
    for ending, found in written.items():
        figures.write_csv(figures.beside(stem, ending), found)
    drawn = [RATIO, SCALE, *([LAMBDA] if any(not math.isnan(row["lambda"]) for row in rows) else [])]
    for quantity in drawn:
        print(table(rows, quantity.column, f"{quantity.title.partition(',')[0]}, mean over {study.data}") + "\n")
    print(EFFECTIVE_SCALE)
    for label in study.models:
        _print_model(label, rows, learned)
    print("\n" + readings_text(readings))
    figures.save(draw(rows, drawn, study.data, EFFECTIVE_SCALE), stem)
    print(f"written to {', '.join(f'{stem}{ending}' for ending in ('.csv', *written, '.png'))} and {stem}.pdf")


def columns_of(place: Row, scales: Scales | None, adapted: float | None) -> Row:
    """What is measured of one block. Raises ``UserError`` for one that has no x:F."""
    if scales is None:
        raise UserError(
            f"{place['model']}: {place['block']} has no x:F: its rule mixes features or carries several tensors, or "
            "its norm is no affine map of its input"
        )
    a, b, ratio, closed, parts = map(estimate, (scales.a, scales.b, scales.ratio, scales.closed_form, scales.parts))
    return {
        "ratio": ratio.mean,
        "ratio_standard_error": ratio.sem,
        "ratio_closed_form": closed.mean,
        "largest_relative_difference": float(scales.difference.max()),
        "effective_scale": a.mean,
        "effective_scale_standard_error": a.sem,
        "branch_coefficient": b.mean,
        "skip_part_over_branch_part": parts.mean,
        "largest_output_difference": float(scales.mismatch.max()),
        "lambda": math.nan if adapted is None else adapted,
        "lambda_standard_error": 0.0,
        "examples": a.examples,
    }


def learned_vectors(place: Row, skip: SkipConnection) -> list[Row]:
    """Every gain G_k.weight and every w of wskip: its mean, mean absolute value, root mean square, norm."""
    vectors = {f"gain of G_{step}": norm.weight for step, norm in enumerate(skip.post, 1)}
    vectors.update({"w" if name == "weight" else name: vector for name, vector in skip.learned().items()})
    vectors = {name: vector.detach().double() for name, vector in vectors.items()}
    return [
        {
            **place,
            "vector": name,
            "mean": float(vector.mean()),
            "mean_absolute": float(vector.abs().mean()),
            "rms": float(vector.square().mean().sqrt()),
            "norm": float(vector.norm()),
            "size": vector.numel(),
        }
        for name, vector in vectors.items()
    ]


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
    norm = float(scales.norm.mean())
    return {
        "mean |a|": float(scales.a.mean()),
        "norm of a over the features": norm,
        "norm of a / √C": norm / math.sqrt(skip.dim),
        "mean w": float(gain.mean()),
        "mean λw": float(weight * gain.mean()),
        "norm of w": float(gain.norm()),
        "norm of λw": float(weight * gain.norm()),
        "norm of λw / √C": float(weight * gain.norm() / math.sqrt(skip.dim)),
        "x:F = a/b": float(scales.ratio.mean()),
        "norm of ax / norm of bF": float(scales.parts.mean()),
    }


def readings_rows(label: str, skips: list[SkipConnection], scales: list[Any]) -> list[Row]:
    """A row for each reading: the mean over a model's shown blocks, beside what the paper reports."""
    values = [readings_of(skip, each) for skip, each in zip(skips, scales)]
    blocks, paper = len(values), PAPER.get(label, math.nan)
    means = {name: sum(each[name] for each in values) / blocks for name in values[0]}
    return [
        {"model": label, "reading": name, "blocks": blocks, "value": mean, "paper": paper}
        for name, mean in means.items()
    ]


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
    worst = max(select(rows, model=label), key=lambda row: row["largest_relative_difference"])
    apart = worst["largest_relative_difference"]
    print(f"{label}: closed form and probe differ by {apart:.1e} at most (relative, float64)")
    if not apart <= TOLERANCE:
        print_line(f"note: {label}: closed form and probe disagree at {worst['block']}", "stderr")
    learned = select(learned, model=label)
    for vector in dict.fromkeys(row["vector"] for row in learned):
        mine = select(learned, vector=vector)
        means = [f"{key.replace('_', ' ')} {fmean(row[key] for row in mine):.4g}" for key in MEASURES]
        print(f"{label}: {vector} over {len(mine)} blocks: {', '.join(means)}")
