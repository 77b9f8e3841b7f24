"""Activations against width for every rule: muP's coordinate check.

Source: Yang et al. 2022, "Tensor Programs V".

``python experiments/coordinates.py [RULE ...]`` writes results/coordinates.csv and the figure in a
minute on one core, and prints slopes over log width: of the log size of the last block's output,
and of the log of its change by one to three Adam steps towards random targets. The model has six
blocks ``W2 relu(W1 h)``, drawn by torch and rescaled by the rule, at four widths; with
``--language-models`` it is fairseq's decoder, ``transformer_lm_RULE``, on random words (three
minutes). Where the change has slope 0, a learning rate found at a small width may be used at a
large one.
"""

import argparse
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import linear_regression
from types import SimpleNamespace
from typing import Any

import matplotlib.figure
import torch
from fairseq import models
from fairseq.data import Dictionary
from torch import Tensor, nn
from torch.nn import functional

from fairseq_rskip.analysis import figures
from fairseq_rskip.analysis.depth import Stack
from fairseq_rskip.analysis.figures import Row, select
from fairseq_rskip.console import Parser
from fairseq_rskip.errors import exit_status
from fairseq_rskip.models import skip_architectures
from fairseq_rskip.residual import KINDS, Place, Weight, create_skip, skips

STEM = Path(__file__).resolve().parents[1] / "results" / "coordinates"
LM_STEM = STEM.with_name("coordinates_lm")
WIDTHS = (64, 128, 256, 512)
STEPS = 3
BLOCKS = 6
TOKENS = 64
WORDS = 200
RATE = 1e-3  # Adam's
COLUMNS = 7

ARCHITECTURES = set(skip_architectures())
LM_RULES = sorted(
    name.removeprefix("transformer_lm_")
    for name in ARCHITECTURES
    if name.startswith("transformer_lm_")
    and f"{name}_tiny" in ARCHITECTURES
    and "tfixup" not in name  # needs an encoder
)
Forward = Callable[[], tuple[Tensor, Sequence[Tensor]]]  # the loss, and the output of each block


def stack(kind: str, width: int) -> tuple[nn.Module, Forward]:
    """Blocks of a kind around feed-forward branches."""
    branches = nn.ModuleList()
    for _ in range(BLOCKS):
        branches.append(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)))
    skips = nn.ModuleList()
    for block in range(BLOCKS):
        skips.append(create_skip(kind, width, place=Place("encoder", "ffn", block, BLOCKS)))

    drawn = (3 * width) ** -0.5  # the standard deviation of torch's linear layer
    for skip, (first, _, last) in zip(skips, branches):
        skip.initialise(
            {
                "fc1": Weight(first.weight, drawn, first.bias),
                "fc2": Weight(last.weight, drawn, last.bias),
            }
        )
    whole = Stack(branches, skips)
    x = torch.randn(TOKENS, width)
    target = torch.randn(TOKENS, width)

    def run() -> tuple[Tensor, Sequence[Tensor]]:
        _, outputs = whole(x)
        return functional.mse_loss(outputs[-1], target), outputs

    return nn.ModuleList((skips, branches)), run


def language_model(rule: str, width: int) -> tuple[nn.Module, Forward]:
    """fairseq's decoder with a rule, heads of 32."""
    words = Dictionary()
    words.pad_to_multiple_(WORDS)
    options = argparse.Namespace(
        arch=f"transformer_lm_{rule}",
        decoder_embed_dim=width,
        decoder_ffn_embed_dim=4 * width,
        decoder_attention_heads=width // 32,
        decoder_layers=BLOCKS,
        dropout=0.0,
        max_target_positions=TOKENS,
    )
    task = SimpleNamespace(
        source_dictionary=words, target_dictionary=words, output_dictionary=words
    )
    model = models.build_model(options, task)
    outputs: list[Tensor] = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
    text = torch.randint(words.nspecial, len(words), (4, TOKENS // 4 + 1))

    def run() -> tuple[Tensor, Sequence[Tensor]]:
        outputs.clear()
        logits, _ = model(text[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()), outputs

    return model, run


def measure(make: Callable[[str, int], tuple[nn.Module, Forward]], kind: str) -> Iterator[Row]:
    """Rows of a kind: ``size`` and ``change`` of each block's output after ``step`` updates.

    ``block`` counts from 1. ``size`` is the root mean square of the output, ``change`` that of its
    difference from the output before the first update.
    """
    for width in WIDTHS:
        torch.manual_seed(0)
        model, run = make(kind, width)
        optimizer = torch.optim.Adam(model.parameters(), RATE)
        before: list[Tensor] = []
        for step in range(STEPS + 1):
            for skip in skips(model).values():
                skip.set_num_updates(step)
            loss, outputs = run()
            now = [output.detach() for output in outputs]
            if step == 0:
                before = now
            for block, (output, at_start) in enumerate(zip(now, before), start=1):
                yield {
                    "kind": kind,
                    "width": width,
                    "step": step,
                    "block": block,
                    "size": root_mean_square(output),
                    "change": root_mean_square(output - at_start),
                }
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for skip in skips(model).values():
                skip.to_unit_length()


def root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def slope(rows: Sequence[Row], name: str) -> float:
    """The slope of log ``name`` over log width, by least squares; NaN where there is none of it."""
    if min(row[name] for row in rows) == 0:
        return math.nan
    widths = [math.log(row["width"]) for row in rows]
    values = [math.log(row[name]) for row in rows]
    return linear_regression(widths, values).slope


def plot(rows: Sequence[Row], kinds: Sequence[str]) -> Any:
    """A panel for every kind, against width, with two lines for each block.

    They are its size at initialisation (dotted) and its change.
    """
    height = math.ceil(len(kinds) / COLUMNS)
    figure = matplotlib.figure.Figure(figsize=(2.1 * COLUMNS, 1.9 * height), layout="constrained")
    axes = figure.subplots(height, COLUMNS, squeeze=False).flat
    for axis in axes[len(kinds) :]:
        axis.set_axis_off()
    for axis, kind in zip(axes, kinds):
        mine = select(rows, kind=kind)
        for block in range(1, BLOCKS + 1):
            colour = figures.style(block)["color"]
            at_start = [row["size"] for row in select(mine, step=0, block=block)]
            changes = [row["change"] for row in select(mine, step=STEPS, block=block)]
            axis.plot(WIDTHS, at_start, ":", color=colour)
            axis.plot(WIDTHS, changes, "-", color=colour)
        axis.set(xscale="log", yscale="log", title=kind)
        axis.set_xticks(WIDTHS, map(str, WIDTHS))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
    figure.suptitle(
        f"rms of each block's output at the start (dotted) and of its change by {STEPS} steps, "
        "against width"
    )
    return figure


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "rules",
        nargs="*",
        metavar="RULE",
        help="kinds, or what follows transformer_lm_ (every one)",
    )
    parser.add_argument(
        "--language-models", action="store_true", help="fairseq's decoder in place of the stack"
    )
    parser.add_argument("--output", type=Path, metavar="STEM", help="of the CSV and the figure")
    options = parser.parse_args()
    make, known, stem = stack, list(KINDS), STEM
    if options.language_models:
        make, known, stem = language_model, LM_RULES, LM_STEM
    kinds = options.rules or known
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        parser.error(f"no rule {', '.join(unknown)}: expected of {', '.join(known)}")

    logging.getLogger().setLevel(logging.WARNING)  # fairseq lets every library's remarks through
    torch.set_num_threads(1)  # the matrices are small
    rows: list[Row] = []
    for kind in kinds:
        rows += measure(make, kind)
    about = f"{BLOCKS} blocks, {STEPS} Adam steps at {RATE:g}, widths {', '.join(map(str, WIDTHS))}"
    figures.write(options.output or stem, rows, plot(rows, kinds), slopes(rows, kinds), about)


def slopes(rows: Sequence[Row], kinds: Sequence[str]) -> list[list[str]]:
    """A table of the slopes of each kind, in the last block."""
    steps = range(1, STEPS + 1)
    heading = ["slope over width, last block", "size at the start"]
    table = [heading + [f"change by step {step}" for step in steps]]
    for kind in kinds:
        last = select(rows, kind=kind, block=BLOCKS)
        values = [slope(select(last, step=0), "size")]
        values += [slope(select(last, step=step), "change") for step in steps]
        table.append([kind, *(f"{value:+.2f}" for value in values)])
    return table


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
