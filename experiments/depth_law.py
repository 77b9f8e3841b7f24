"""The gradient at the top of a fresh decoder over that at its bottom, against depth.

The page is docs/depth.md.

``python experiments/depth_law.py`` writes results/depth_law.csv and the figure; nothing is trained.
Decoders of 64 features and 2 heads over an encoder of 6 layers, with 18 and 36 layers over an
encoder as deep, too; float64 (but for fairseq's softmax), no dropout, random tokens, the cross
entropy of random targets. The value is the geometric mean over the seeds of the gradient norm at
the last layer's output over that at the first's.

results/depth_branches.csv has, for each residual of a decoder at lambda 1 and 2, ``f`` = |F(x)| /
|x|, ``b`` = |J_F^T g| / |g| for the gradient g that reaches F, and the ``gain`` of the gradient's
norm by the page's formula.
"""

import itertools
import math
import statistics
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq import models
from fairseq.data import Dictionary

import fairseq_rskip.models  # noqa: F401  (registers the architectures)
from fairseq_rskip.analysis import figures
from fairseq_rskip.console import Parser, print_line
from fairseq_rskip.errors import exit_status
from fairseq_rskip.residual import skips

STEM = Path(__file__).resolve().parents[1] / "results" / "depth_law"
DEPTHS = (6, 12, 18, 36, 72, 144)
SEEDS = (1, 2, 3)
SENTENCES, TOKENS, WORDS = 8, 16, 200
FIRST_WORD = 4  # behind fairseq's special symbols
ENCODER = 6
SIZE = {"encoder_embed_dim": 64, "encoder_ffn_embed_dim": 256, "encoder_attention_heads": 2}
SIZE |= {"decoder_embed_dim": 64, "decoder_ffn_embed_dim": 256, "decoder_attention_heads": 2}
ROWS = {
    "post-norm": {"arch": "transformer_postln"},
    **{f"{n}rSkip+LN": {"arch": "transformer_rskip_ln", "skip_lambda": n} for n in (2, 3, 4, 5)},
    "rSkip+LN, auto": {"arch": "transformer_rskip_ln", "skip_lambda": "auto"},
    "xSkip+LN, auto": {"arch": "transformer_xskip_ln", "skip_lambda": "auto"},
    "DeepNorm": {"arch": "transformer_deepnorm"},
    "Keel": {"arch": "transformer_keel"},
    "pre-norm": {"arch": "transformer_preln"},
}


def build(row: dict, encoder_layers: int, depth: int, seed: int) -> torch.nn.Module:
    """A fresh Transformer with ``depth`` decoder layers, in float64."""
    words = Dictionary()
    for i in range(WORDS):
        words.add_symbol(f"w{i}")
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    torch.manual_seed(seed)
    layers = {"encoder_layers": encoder_layers, "decoder_layers": depth}
    return models.build_model(Namespace(**row, **SIZE, **layers, dropout=0.0), task).double()


def backward(model: torch.nn.Module, seed: int) -> list[float]:
    """Backpropagate the loss; return its gradient's norm at the output of each decoder layer."""
    generator = torch.Generator().manual_seed(seed)
    source, target, expected = (
        torch.randint(FIRST_WORD, FIRST_WORD + WORDS, (SENTENCES, TOKENS), generator=generator)
        for _ in range(3)
    )
    outputs: list[torch.Tensor] = []

    def keep(module, inputs, output):
        output[0].retain_grad()
        outputs.append(output[0])

    for layer in model.decoder.layers:
        layer.register_forward_hook(keep)
    logits, _ = model(source, torch.full((SENTENCES,), TOKENS), target)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), expected.flatten()).backward()
    return [float(output.grad.norm()) for output in outputs]


class Watched:
    """The tensors of one skip connection in a backward pass.

    ``h`` is a copy of the branch's input, whose gradient is that of the branch alone; ``x`` and
    ``f_x`` are what the skip connection adds.
    """

    def __init__(self, skip: torch.nn.Module):
        self.prepare = skip.prepare
        skip.prepare = self._prepare
        skip.register_forward_pre_hook(self._keep)

    def _prepare(self, x):
        h, carried = self.prepare(x)
        self.h = h.clone()
        return self.h, carried

    def _keep(self, skip, inputs):
        self.x, self.f_x, *_ = inputs
        self.h.retain_grad()
        self.f_x.retain_grad()


def branches(row: dict, depth: int, seed: int) -> tuple[list[dict], float]:
    """``f``, ``b`` and ``gain`` of each residual of a decoder, and the gradient's ratio.

    The ratio is the gradient at the top over that at the bottom.
    """
    model = build(row, ENCODER, depth, seed)
    watched = {name: Watched(skip) for name, skip in skips(model.decoder).items()}
    norms = backward(model, seed)
    halvings = row.get("skip_lambda", 1) - 1  # each further step of the recursion halves the angle
    rows = []
    for name, seen in watched.items():
        f = seen.f_x.detach().norm().item() / seen.x.detach().norm().item()
        b = seen.h.grad.norm().item() / seen.f_x.grad.norm().item()
        angle = math.atan(f) / 2**halvings
        _, layer, sublayer = name.split(".")
        rows.append(
            {
                "layer": int(layer),
                "sublayer": sublayer.removesuffix("_skip"),
                "f": f,
                "b": b,
                "gain": math.hypot(math.cos(angle), math.sin(angle) * b / f),
            }
        )
    return rows, norms[-1] / norms[0]


def ratios() -> list[dict]:
    """A row for each rule and depth, which are printed: the gradient at the top over the bottom."""
    table = []
    pairs = [(ENCODER, depth) for depth in DEPTHS] + [(depth, depth) for depth in (18, 36)]
    for (label, row), (encoder, depth) in itertools.product(ROWS.items(), pairs):
        by_seed = []
        for seed in SEEDS:
            norms = backward(build(row, encoder, depth, seed), seed)
            by_seed.append(norms[-1] / norms[0])
        mean = f"{statistics.geometric_mean(by_seed):.4g}"
        table.append(
            {"rule": label, "encoder_layers": encoder, "layers": depth, "top_over_bottom": mean}
        )
        print_line(f"{label} {encoder}+{depth}: {mean}")
    return table


def formula() -> list[dict]:
    """A row for each residual of some decoders; prints the ratio beside that of the formula."""
    parts = []
    for label, depth in itertools.product(("post-norm", "2rSkip+LN"), (6, 18, 36)):
        measured, by_formula = [], []
        for seed in SEEDS:
            rows, ratio = branches(ROWS[label], depth, seed)
            parts += [{"rule": label, "layers": depth, "seed": seed, **each} for each in rows]
            measured.append(ratio)
            by_formula.append(1 / math.prod(each["gain"] for each in rows if each["layer"] > 0))
        mean = statistics.geometric_mean(measured)
        expected = statistics.geometric_mean(by_formula)
        print_line(f"{label} {depth}: {mean:.3g}, by the formula {expected:.3g}")
    return parts


def draw(table: list[dict]) -> None:
    """The figure: the ratio against depth, a line for each rule."""
    figure, (axis,) = figures.new_figure(width=7)
    for number, label in enumerate(ROWS):
        mine = figures.select(table, rule=label, encoder_layers=ENCODER)
        values = [float(each["top_over_bottom"]) for each in mine]
        axis.plot(DEPTHS, values, label=label, **figures.style(number))
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="decoder layers",
        ylabel="gradient at the last layer / at the first",
    )
    axis.set_xticks(DEPTHS, list(map(str, DEPTHS)))
    axis.minorticks_off()
    axis.set_ylim(0.3, 100)  # post-norm leaves the figure at 36 layers
    axis.legend(fontsize=8, ncols=2)
    figures.save(figure, STEM)


def main() -> None:
    Parser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    table = ratios()
    figures.write_csv(STEM.with_suffix(".csv"), table)
    figures.write_csv(STEM.with_name("depth_branches.csv"), formula())
    draw(table)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
