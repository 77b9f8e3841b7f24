"""Figure 3: the norm of the loss gradient at the output y of every residual block.

The mean over examples of the Frobenius norm of dL_i/dy_i, where L_i is the loss of example i alone: cross entropy of an
image; of a sentence the mean cross entropy of its target's tokens, teacher-forced, without label smoothing. Models run
in evaluation mode, so that examples do not see each other.
"""

import argparse
import math
import sys
from typing import Any, Dict, List

from analysing import models, table
from analysing.progress import note, progress
from analysing.study import Place, Study
from fairseq_rskip.analysis import figures
from fairseq_rskip.analysis.gradients import Estimate, gradient_norms

EXAMPLES = 10_000  # as in the paper


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser, EXAMPLES)


def run(options: argparse.Namespace) -> None:
    """Measure, print, write. Raises ``UserError``."""
    stem = figures.check_stem(options.output)
    study = models.load_study(options)
    places = {label: models.shown(study, label, options) for label in study.models}
    found: Dict[str, Dict[str, Estimate]] = {}
    for label, model in study.models.items():
        found[label] = gradient_norms(model, progress(study.batches(), study.batch_count, label), study.losses)
        _warn(label, found[label])
        done = {name: places[name] for name in found}
        figures.write_csv(stem.with_name(f"{stem.name}.csv"), rows(done, found))  # what is done is not lost
    means = {label: {name: e.mean for name, e in blocks.items()} for label, blocks in found.items()}
    print(table.text(places, means, f"gradient norm at y, mean over {study.data}"))
    figures.save(draw(places, found, study), stem)
    print(f"written to {stem}.csv, {stem}.png and {stem}.pdf")


def rows(places: Dict[str, List[Place]], found: Dict[str, Dict[str, Estimate]]) -> List[Dict[str, Any]]:
    """One row a model and block."""
    return [
        {
            "model": label,
            "block": place.name,
            "index": place.index,
            "group": place.group,
            "gradient_norm": found[label][place.name].mean,
            "standard_error": found[label][place.name].sem,
            "examples": found[label][place.name].examples,
        }
        for label, shown in places.items()
        for place in shown
    ]


def draw(places: Dict[str, List[Place]], found: Dict[str, Dict[str, Estimate]], study: Study) -> Any:
    """The figure: a panel for a ResNet, one each for encoder and decoder; bars are standard errors."""
    sides = table.panels(places)
    figure, axes = figures.new_figure(columns=len(sides))
    means = {label: {name: e.mean for name, e in blocks.items()} for label, blocks in found.items()}
    errors = {label: {name: e.sem for name, e in blocks.items()} for label, blocks in found.items()}
    for axis, side in zip(axes, sides):
        table.draw(axis, side, places, means, errors)
        axis.set_yscale("log")
    axes[0].set_ylabel("gradient norm at y")
    axes[-1].legend(fontsize="small")
    figure.suptitle(f"Mean over {study.data}", fontsize="medium")
    return figure


def _warn(label: str, blocks: Dict[str, Estimate]) -> None:
    bad = [name for name, value in blocks.items() if not math.isfinite(value.mean)]
    if bad:
        note(f"{label}: the gradient is not finite at {len(bad)} of {len(blocks)} blocks, the last of them {bad[-1]}")
    sys.stdout.flush()
