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
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq import models
from fairseq.data import Dictionary

import fairseq_rskip.models  # noqa: F401  (registers the architectures)
from fairseq_rskip.analysis import figures
from fairseq_rskip.console import print_line
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

    def keep(module, given, found):
        found[0].retain_grad()
        outputs.append(found[0])

    for layer in model.decoder.layers:
        layer.register_forward_hook(keep)
    logits, _ = model(source, torch.full((SENTENCES,), TOKENS), target)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), expected.flatten()).backward()
    return [float(output.grad.norm()) for output in outputs]


def branches(row: dict, depth: int, seed: int) -> tuple[list[dict], float]:
    """``f``, ``b`` and ``gain`` of each residual of a decoder, and the gradient's ratio.

    The ratio is the gradient at the top over that at the bottom.
    """
    model, seen = build(row, ENCODER, depth, seed), {}

    def watch(name, skip):
        prepare = skip.prepare

        def with_copy(x):  # whose gradient is that of the branch alone
            h, carried = prepare(x)
            seen[name] = [h.clone()]
            return seen[name][0], carried

        def keep(module, given):
            for tensor in (seen[name][0], given[1]):
                tensor.retain_grad()
            seen[name] += given[:2]

        skip.prepare = with_copy
        skip.register_forward_pre_hook(keep)

    for name, skip in skips(model.decoder).items():
        watch(name, skip)
    norms, found = backward(model, seed), []
    for name, (h, x, f_x) in seen.items():
        f, b = (
            f_x.detach().norm().item() / x.detach().norm().item(),
            h.grad.norm().item() / f_x.grad.norm().item(),
        )
        angle = math.atan(f) / 2 ** (row.get("skip_lambda", 1) - 1)
        gain = math.hypot(math.cos(angle), math.sin(angle) * b / f)
        _, layer, sublayer = name.split(".")
        found.append(
            {
                "layer": int(layer),
                "sublayer": sublayer.removesuffix("_skip"),
                "f": f,
                "b": b,
                "gain": gain,
            }
        )
    return found, norms[-1] / norms[0]


def main() -> None:
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    table = []
    pairs = [(ENCODER, depth) for depth in DEPTHS] + [(depth, depth) for depth in (18, 36)]
    for label, row in ROWS.items():
        for encoder, depth in pairs:
            norms = [backward(build(row, encoder, depth, seed), seed) for seed in SEEDS]
            mean = f"{statistics.geometric_mean(each[-1] / each[0] for each in norms):.4g}"
            table.append(
                {"rule": label, "encoder_layers": encoder, "layers": depth, "top_over_bottom": mean}
            )
            print_line(f"{label} {encoder}+{depth}: {mean}")
    figures.write_csv(STEM.with_suffix(".csv"), table)
    parts = []
    for label, depth in itertools.product(("post-norm", "2rSkip+LN"), (6, 18, 36)):
        measured, by_formula = [], []
        for seed in SEEDS:
            rows, ratio = branches(ROWS[label], depth, seed)
            parts += [{"rule": label, "layers": depth, "seed": seed, **each} for each in rows]
            measured.append(ratio)
            by_formula.append(1 / math.prod(each["gain"] for each in rows if each["layer"] > 0))
        means = statistics.geometric_mean(measured), statistics.geometric_mean(by_formula)
        print_line("{} {}: {:.3g}, by the formula {:.3g}".format(label, depth, *means))
    figures.write_csv(STEM.with_name("depth_branches.csv"), parts)
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


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
