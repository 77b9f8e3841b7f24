"""The gradient at the top of a fresh decoder over that at its bottom, against depth, for the page docs/depth.md.

``python experiments/depth_law.py`` writes results/depth_law.csv and the figure; nothing is trained. Decoders of 64
features and 2 heads over an encoder of 6 layers, float64 (but for fairseq's softmax), no dropout, random tokens, the
cross entropy of random targets; the geometric mean over the seeds of the gradient norm at the last layer's output over
that at the first's.
"""

import statistics
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq import models
from fairseq.data import Dictionary

import fairseq_rskip.models  # noqa: F401  (registers the architectures)
from fairseq_rskip.analysis import figures
from fairseq_rskip.console import print_line

STEM = Path(__file__).resolve().parents[1] / "results" / "depth_law"
DEPTHS = (6, 12, 18, 36, 72, 144)
SEEDS = (1, 2, 3)
SENTENCES, TOKENS, WORDS = 8, 16, 200
SIZE = {"encoder_embed_dim": 64, "encoder_ffn_embed_dim": 256, "encoder_attention_heads": 2, "encoder_layers": 6}
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


def gradient_norms(row: dict, depth: int, seed: int) -> list[float]:
    """The norm of the loss gradient at the output of each decoder layer, from the first to the last."""
    words = Dictionary()
    for i in range(WORDS):
        words.add_symbol(f"w{i}")
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    torch.manual_seed(seed)
    model = models.build_model(Namespace(**row, **SIZE, decoder_layers=depth, dropout=0.0), task).double()
    generator = torch.Generator().manual_seed(seed)
    source, target, expected = (
        torch.randint(words.nspecial, len(words), (SENTENCES, TOKENS), generator=generator) for _ in range(3)
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


def main() -> None:
    torch.set_num_threads(1)
    table = []
    for label, row in ROWS.items():
        for depth in DEPTHS:
            ratios = [norms[-1] / norms[0] for norms in (gradient_norms(row, depth, seed) for seed in SEEDS)]
            mean = f"{statistics.geometric_mean(ratios):.4g}"
            table.append({"rule": label, "layers": depth, "top_over_bottom": mean})
            print_line(f"{label} {depth}: {mean}")
    figures.write_csv(STEM.with_suffix(".csv"), table)
    figure, (axis,) = figures.new_figure(width=7)
    for number, label in enumerate(ROWS):
        values = [float(each["top_over_bottom"]) for each in table if each["rule"] == label]
        axis.plot(DEPTHS, values, label=label, **figures.style(number))
    axis.set(xscale="log", yscale="log", xlabel="decoder layers", ylabel="gradient at the last layer / at the first")
    axis.set_xticks(DEPTHS, list(map(str, DEPTHS)))
    axis.minorticks_off()
    axis.set_ylim(0.3, 100)  # post-norm leaves the figure at 36 layers
    axis.legend(fontsize=8, ncols=2)
    figures.save(figure, STEM)


if __name__ == "__main__":
    main()
