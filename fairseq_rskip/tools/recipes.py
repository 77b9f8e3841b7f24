"""The settings each corpus is trained with, in one table.

docs/training.md says where every value comes from.
"""

from typing import Any, NamedTuple


class Recipe(NamedTuple):
    """``tokens`` per step over all processes, and fairseq-train's ``options``.

    Options without an lr have :func:`peak_lr`.
    """

    tokens: int
    options: dict[str, Any]


# Vaswani et al. 2017, as in tensor2tensor's transformer_base_v1; each architecture has its dropout
ADAM = {
    "optimizer": "adam",
    "adam-betas": "(0.9, 0.98)",
    "adam-eps": "1e-9",
    "lr-scheduler": "inverse_sqrt",
    "warmup-updates": 4000,
    "warmup-init-lr": "1e-7",
    "seed": 1,
}
VASWANI = {**ADAM, "criterion": "label_smoothed_cross_entropy", "label-smoothing": 0.1}
EPOCHS = {"keep-last-epochs": 10}
UPDATES = {"save-interval-updates": 2500, "keep-interval-updates": 10}
WMT = {**VASWANI, "max-update": 550_000, "no-epoch-checkpoints": True, **UPDATES}
SMALL = {**VASWANI, "lr": 0.001, "warmup-updates": 800, "dropout": 0.2, "max-epoch": 20, **EPOCHS}
DEMO = {**VASWANI, "lr": 0.003, "warmup-updates": 200, "max-epoch": 4, "log-interval": 50, **EPOCHS}
# fairseq's examples/language_model: transformer_lm on WikiText-103; the adaptive model has another
LM = {
    **ADAM,
    "criterion": "cross_entropy",
    "weight-decay": 0.01,
    "clip-norm": 0.0,
    "sample-break-mode": "none",
}
TEXT = {
    **LM,
    "lr": 0.001,
    "warmup-updates": 400,
    "tokens-per-sample": 256,
    "max-epoch": 20,
    **EPOCHS,
}
WIKITEXT = {**LM, "lr": 0.0005, "tokens-per-sample": 512, "max-update": 50_000, **UPDATES}
# Transformer-Tiny of Wu et al. 2021, "Good for Misconceived Reasons"; docs/training.md has details
MULTI30K_TINY = {
    **VASWANI,
    "encoder-layers": 4,
    "encoder-embed-dim": 128,
    "encoder-ffn-embed-dim": 256,
    "encoder-attention-heads": 4,
    "decoder-layers": 4,
    "decoder-embed-dim": 128,
    "decoder-ffn-embed-dim": 256,
    "decoder-attention-heads": 4,
    "dropout": 0.3,
    "lr": 0.005,
    "warmup-updates": 2000,
    "max-update": 8000,
    "patience": 10,
    "save-interval-updates": 0,  # a validation between two epochs would count for the patience
    **EPOCHS,
}

RECIPES = {
    "iwslt15-en-vi": Recipe(4096, {**VASWANI, "max-update": 100_000, **EPOCHS}),
    "wmt14-en-de": Recipe(16384, WMT),
    "wmt14-en-fr": Recipe(16384, WMT),
    "small": Recipe(2048, SMALL),
    "multi30k-en-de": Recipe(2048, SMALL),
    "multi30k-en-fr": Recipe(2048, SMALL),
    "multi30k-tiny": Recipe(4096, MULTI30K_TINY),
    "numbers": Recipe(1000, {**DEMO, "save-interval-updates": 0}),
    "medium": Recipe(4096, {**VASWANI, "max-update": 100_000, **EPOCHS, **UPDATES}),
    "large": Recipe(16384, {**WMT, "max-update": 100_000}),
    "text": Recipe(4096, TEXT),
    "captions": Recipe(4096, TEXT),
    "sotu": Recipe(4096, TEXT),
    "wikitext103": Recipe(32768, WIKITEXT),
}
# A step takes seconds on a CPU: log more often, and leave the second core to the model.
CPU = {"log-interval": 20, "num-workers": 0}
CPU_SAVE_INTERVAL = 200  # updates; an epoch may take hours


def recipe_for(pairs: int) -> str:
    """The recipe for your own corpus of ``pairs`` training pairs, 0 if they cannot be counted."""
    if pairs == 0:
        return "medium"
    if pairs < 100_000:
        return "small"
    if pairs < 1_000_000:
        return "medium"
    return "large"


def peak_lr(dim: int) -> float:
    """Vaswani et al.'s d^-0.5 · 4000^-0.5, rounded to 0.00005: 0.0007 for 512, 0.0005 for 1024."""
    return round(2 * (dim * 4000) ** -0.5, 4) / 2
