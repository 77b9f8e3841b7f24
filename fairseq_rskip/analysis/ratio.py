"""How much of x and of F(x) is in y, block by block: the ratio x:F, learned gains, the paper's effective scale.

With the statistics of every G held constant, y = a*x + b*F + c. The ratio a:b is measured by a probe, and by the closed
form of appendix A; both must agree. The effective scale that is drawn is the mean of |a| over examples, positions and
features; every other reading of that quantity, which the paper does not define, is printed beside it (``readings``).
"""

import math
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import nn

from ..errors import UserError
from ..residual import SkipConnection
from ..tools.console import print_line, progress
from . import figures, readings
from .coefficients import CoefficientProbe, Scales
from .gradients import estimate
from .learned import lambdas
from .study import Place, Study, draw_blocks, panels, table

EXAMPLES = 1_000
TOLERANCE = 1e-9  # of float64, with room for sums that cancel
READING = "effective scale = mean |a|, the coefficient of x in y with G's statistics held constant"


def report(study: Study, stem: Path) -> None:
    """Measure the models of ``study``, print tables, write ``stem``'s CSV files after each of them and its figure."""
    places = study.places()
    found: Dict[str, List[Dict[str, Any]]] = {}
    learned: List[Dict[str, Any]] = []
    measured: Dict[str, Dict[str, Scales]] = {}
    for label, model in study.models.items():
        scales = measured[label] = _measure(label, model, study)
        adapted = lambdas(model)
        found[label] = [_row(label, place, scales[place.name], adapted.get(place.name)) for place in places[label]]
        learned += _learned(label, model, places[label])
        figures.write_csv(stem.with_name(f"{stem.name}.csv"), [row for rows in found.values() for row in rows])
        if learned:
            figures.write_csv(stem.with_name(f"{stem.name}-learned.csv"), learned)
    read = readings.rows(study.models, places, measured)
    figures.write_csv(stem.with_name(f"{stem.name}-readings.csv"), read)
    _print(places, found, learned, study)
    print("\n" + readings.text(read))
    figures.save(draw(places, found, study), stem)
    more = f", {stem}-learned.csv" if learned else ""
    print(f"written to {stem}.csv{more}, {stem}-readings.csv, {stem}.png and {stem}.pdf")


def _measure(label: str, model: nn.Module, study: Study) -> Dict[str, Scales]:
    with CoefficientProbe(model) as probe, torch.no_grad():
        for batch in progress(study.batches(), study.batch_count, label):
            study.losses(model, batch)
    return probe.scales


def _row(label: str, place: Place, scales: Scales, adapted: Optional[float]) -> Dict[str, Any]:
    if not scales.a:
        raise UserError(
            f"{label}: {place.name} has no x:F: its rule mixes features or carries several tensors, or its norm is no "
            "affine map of its input"
        )
    measured = (scales.a, scales.b, scales.ratio, scales.closed_form, scales.parts)
    a, b, ratio, closed, parts = (estimate(torch.cat(values)) for values in measured)
    return {
        "model": label,
        "block": place.name,
        "index": place.index,
        "group": place.group,
        "ratio": ratio.mean,
        "ratio_standard_error": ratio.sem,
        "ratio_closed_form": closed.mean,
        "largest_relative_difference": scales.difference,
        "effective_scale": a.mean,
        "effective_scale_standard_error": a.sem,
        "branch_coefficient": b.mean,
        "skip_part_over_branch_part": parts.mean,
        "largest_output_difference": scales.mismatch,
        "lambda": math.nan if adapted is None else adapted,
        "lambda_standard_error": 0.0,
        "examples": a.examples,
    }


def _learned(label: str, model: nn.Module, shown: List[Place]) -> List[Dict[str, Any]]:
    """Every gain G_k.weight and every w of wskip: its mean, mean absolute value, root mean square, norm."""
    modules = dict(model.named_modules())
    rows = []
    for place in shown:
        skip: SkipConnection = modules[place.name]
        vectors = {f"gain of G_{step}": norm.weight for step, norm in enumerate(skip.norms, 1)}
        vectors.update({"w" if name == "weight" else name: vector for name, vector in skip.learned().items()})
        for what, vector in vectors.items():
            vector = vector.detach().double()
            values = {"mean": vector.mean(), "mean_absolute": vector.abs().mean()}
            values |= {"rms": vector.square().mean().sqrt(), "norm": vector.norm()}
            rows.append(
                {"model": label, "block": place.name, "index": place.index, "group": place.group, "vector": what}
                | {name: float(value) for name, value in values.items()}
                | {"size": vector.numel()}
            )
    return rows


def _print(places: Any, found: Any, learned: List[Dict[str, Any]], study: Study) -> None:
    for key, title in (("ratio", "x:F in y"), ("effective_scale", "effective scale"), *_adaptive(found)):
        print(table(places, _values(found, key), f"{title}, mean over {study.data}") + "\n")
    print(READING)
    for label, rows in found.items():
        apart = max(row["largest_relative_difference"] for row in rows)
        print(f"{label}: closed form and probe differ by {apart:.1e} at most (relative, float64)")
        if not apart <= TOLERANCE:
            worst = max(rows, key=lambda row: row["largest_relative_difference"])
            print_line(f"note: {label}: closed form and probe disagree at {worst['block']}", "stderr")
        for what in dict.fromkeys(row["vector"] for row in learned if row["model"] == label):
            mine = [row for row in learned if row["model"] == label and row["vector"] == what]
            kinds = {"mean": "mean", "mean_absolute": "mean absolute value", "rms": "rms", "norm": "norm"}
            means = [f"{kind} {sum(row[key] for row in mine) / len(mine):.4g}" for key, kind in kinds.items()]
            print(f"{label}: {what} over {len(mine)} blocks: {', '.join(means)}")


def draw(places: Dict[str, List[Place]], found: Dict[str, List[Dict[str, Any]]], study: Study) -> Any:
    """Ratio and effective scale over the blocks, a panel each, for encoder and decoder apart."""
    sides = panels(places)
    figure, axes = figures.new_figure(columns=(2 + len(_adaptive(found))) * len(sides))
    drawn = (("ratio", "x:F in y"), ("effective_scale", "effective scale, mean |a|"), *_adaptive(found))
    wanted = [(side, *quantity) for side in sides for quantity in drawn]
    for axis, (side, key, title) in zip(axes, wanted):
        draw_blocks(axis, side, places, _values(found, key), _values(found, f"{key}_standard_error"))
        axis.set_ylabel(title)
    axes[-1].legend(fontsize="small")
    figure.suptitle(f"Mean over {study.data}", fontsize="medium")
    figure.supxlabel(READING, fontsize="x-small")
    return figure


def _adaptive(found: Dict[str, List[Dict[str, Any]]]) -> Tuple[Tuple[str, str], ...]:
    """The panel of adaptive λ, where a model has one."""
    adapts = any(not math.isnan(row["lambda"]) for rows in found.values() for row in rows)
    return (("lambda", "adaptive λ"),) if adapts else ()


def _values(found: Dict[str, List[Dict[str, Any]]], key: str) -> Dict[str, Dict[str, float]]:
    return {label: {row["block"]: row[key] for row in rows} for label, rows in found.items()}
