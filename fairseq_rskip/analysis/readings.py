"""Every reading of the paper's "effective scale" that its text allows, of the same networks.

Section 4.3 of Liu et al. (2020) reports a learned effective scale of 2.82 for 2xSkip+LN and 2.64 for 2rSkip+LN,
averaged over the shown blocks of 32 features, and defines it nowhere. Of the vector w it does give a norm, 1.34, and
its size for each feature, 0.24 = 1.34 / √32; so a norm over the features is a reading, too.
"""

import math
from typing import Any, Dict, List

import torch
from torch import nn

from ..residual import SkipConnection
from .coefficients import Scales
from .study import Place

PAPER = {"2xSkip+LN": 2.82, "2rSkip+LN": 2.64}
WIDTH = "{:>34}"


def readings(skip: SkipConnection, scales: Scales) -> Dict[str, float]:
    """Reading -> its value at one skip connection, whose ``scales`` a probe has measured.

    a is the coefficient of x in y, w the gain of the last norm, C the number of features. The gain's readings are NaN
    for a skip without one, and those with λ for a rule that has none.
    """
    gain = getattr(skip.norms[-1], "weight", None) if skip.norms else None
    gain = torch.full((1,), math.nan) if gain is None else gain.detach().double()
    weight = float(getattr(skip.options, "skip_lambda", math.nan))
    norm = float(torch.cat(scales.norm).mean())
    return {
        "mean |a|": float(torch.cat(scales.a).mean()),
        "norm of a over the features": norm,
        "norm of a / √C": norm / math.sqrt(skip.dim),
        "mean w": float(gain.mean()),
        "mean λw": float(weight * gain.mean()),
        "norm of w": float(gain.norm()),
        "norm of λw": float(weight * gain.norm()),
        "norm of λw / √C": float(weight * gain.norm() / math.sqrt(skip.dim)),
        "x:F = a/b": float(torch.cat(scales.ratio).mean()),
        "norm of ax / norm of bF": float(torch.cat(scales.parts).mean()),
    }


def rows(models: Dict[str, nn.Module], places: Dict[str, List[Place]], scales: Any) -> List[Dict[str, Any]]:
    """A row for each model and reading: the mean over its shown blocks, beside what the paper reports.

    scales: label -> module name -> :class:`Scales`
    """
    found = []
    for label, model in models.items():
        modules = dict(model.named_modules())
        blocks = [readings(modules[place.name], scales[label][place.name]) for place in places[label]]
        for reading in blocks[0]:
            mean = sum(block[reading] for block in blocks) / len(blocks)
            paper = PAPER.get(label, math.nan)
            found.append({"model": label, "reading": reading, "blocks": len(blocks), "value": mean, "paper": paper})
    return found


def text(found: List[Dict[str, Any]]) -> str:
    """A line for each reading, a column for each model."""
    labels = list(dict.fromkeys(row["model"] for row in found))
    values = {(row["reading"], row["model"]): row["value"] for row in found}
    lines = [WIDTH.format("reading of the effective scale") + "".join(f"  {label:>12}" for label in labels)]
    for reading in dict.fromkeys(row["reading"] for row in found):
        lines.append(WIDTH.format(reading) + "".join(f"  {values[reading, label]:12.3f}" for label in labels))
    paper = [PAPER.get(label) for label in labels]
    if any(paper):
        lines.append(WIDTH.format("the paper (ResNet-110)") + "".join(f"  {value or '':>12}" for value in paper))
    return "\n".join(lines)
