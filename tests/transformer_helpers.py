"""Small models and batches for the tests of the fairseq side."""

from argparse import Namespace
from types import SimpleNamespace

import torch
from fairseq import models
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY

import fairseq_rskip.models  # noqa: F401  (registers the architectures)
from fairseq_rskip.models.architectures import VARIANTS

TINY = {
    "encoder_embed_dim": 32,
    "encoder_ffn_embed_dim": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
}
ALL_TINY = [f"transformer_{variant}_tiny" for variant in VARIANTS]


def dictionary(words: int = 40) -> Dictionary:
    made = Dictionary()
    for i in range(words):
        made.add_symbol(f"w{i}")
    return made


def task(words: int = 40) -> SimpleNamespace:
    """What ``build_model`` asks of a translation task; one dictionary for both sides."""
    shared = dictionary(words)
    return SimpleNamespace(source_dictionary=shared, target_dictionary=shared)


def build(arch: str, seed: int = 1, **overrides):
    """A model of ours or of stock fairseq, in eval mode."""
    torch.manual_seed(seed)
    return models.build_model(Namespace(arch=arch, **overrides), task()).eval()


def stock_defaults(arch: str) -> Namespace:
    """What fairseq's own architecture function sets."""
    args = Namespace()
    ARCH_CONFIG_REGISTRY[arch](args)
    return args


def randomise(model, seed: int = 7) -> None:
    """Move gains, biases, running statistics and zero matrices off their start.

    At 1 and 0 a mix-up would not show.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 1 and tensor.is_floating_point() and tensor.numel() > 1:
                noise = torch.rand(tensor.shape, generator=generator)
                tensor.copy_(0.5 + noise if not name.endswith(("bias", "mean")) else noise - 0.5)
            elif tensor.dim() > 1 and not tensor.any():
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))


def sentences(lengths=(7, 3, 5), seed: int = 3):
    """Random source and target sentences (lists of token ids, end of sentence included)."""
    generator = torch.Generator().manual_seed(seed)
    vocab = dictionary()

    def draw(length):
        return torch.randint(
            vocab.nspecial, len(vocab), (length,), generator=generator
        ).tolist() + [vocab.eos()]

    return [(draw(n), draw(n + 2)) for n in lengths]


def pad(rows, left: bool = False) -> torch.Tensor:
    """Stack token lists into ``(batch, longest)``."""
    index, width = dictionary().pad(), max(map(len, rows))
    return torch.tensor(
        [[index] * (width - len(r)) + r if left else r + [index] * (width - len(r)) for r in rows]
    )


def batch(pairs, left_pad_source: bool = True):
    """Return ``src_tokens, src_lengths, prev_output_tokens``.

    They are as fairseq's translation task lays them out.
    """
    eos = dictionary().eos()
    src = pad([s for s, _ in pairs], left=left_pad_source)
    return src, torch.tensor([len(s) for s, _ in pairs]), pad([[eos] + t[:-1] for _, t in pairs])
