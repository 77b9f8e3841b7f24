"""FixNorm (Nguyen and Chiang, 2018): word embeddings of unit length, in the output projection, too.

As in Nguyen and Salazar, 2019, "Transformers without Tears" (code
tnq177/transformers_without_tears), what enters a stack is sqrt(dim) times the unit vector,
fairseq's own scale of embeddings, and the logits are ``x @ unit(E)^T``. That code draws E uniformly
from ±0.01; here E starts as in fairseq, so that a run uses stock's random numbers.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from fairseq.dataclass import FairseqDataclass
from torch import Tensor, nn

from fairseq_rskip.errors import UserError
from fairseq_rskip.norms import at_least_float32
from fairseq_rskip.residual import SkipConnection


@dataclass
class FixNormConfig(FairseqDataclass):
    """The length of the embeddings."""

    fix_norm: bool = field(
        default=False,
        metadata={
            "help": "scale every word embedding to unit length, "
            "in the output projection, too (FixNorm)"
        },
    )


def check(arch: str, cfg, skip: SkipConnection) -> None:
    """Raise :class:`~fairseq_rskip.errors.UserError` where ``cfg`` has no single matrix of
    embeddings, where quantisation noise replaces it, or where the rule starts it with another
    length.

    ``cfg`` is a ``TransformerConfig``, ``skip`` a skip connection of its model.
    """
    if cfg.fix_norm and (cfg.adaptive_input or cfg.adaptive_softmax_cutoff is not None):
        raise UserError(
            f"--arch {arch} with --fix-norm: expected neither --adaptive-input nor "
            "--adaptive-softmax-cutoff, which keep several matrices of embeddings"
        )
    if cfg.fix_norm and cfg.quant_noise.scalar > 0:
        raise UserError(
            f"--arch {arch} with --fix-norm: expected no --quant-noise-scalar, which replaces "
            "the embeddings of length 1"
        )
    if cfg.fix_norm and skip.scales_embedding:
        raise UserError(
            f"--arch {arch} with --fix-norm: expected no --skip-kind {skip.kind}, which scales the "
            "embeddings at the start"
        )


def unit_rows(weight: Tensor) -> Tensor:
    """The rows of ``weight``, ``(..., dim)``, over their lengths.

    A row of zeros, such as padding's, stays as it is.
    """
    z = at_least_float32(weight)
    length = torch.linalg.vector_norm(z, 2.0, [-1], True)
    return (z / length.masked_fill(length == 0.0, 1.0)).to(weight.dtype)


class UnitEmbedding(nn.Embedding):
    """``nn.Embedding`` that returns rows of unit length, ``(...)`` to ``(..., dim)``.

    ``weight`` itself may have any length.
    """

    def __init__(self, embedding: nn.Embedding):
        rows, dim = embedding.weight.shape
        super().__init__(rows, dim, embedding.padding_idx, _weight=embedding.weight.detach())

    def forward(self, tokens: Tensor) -> Tensor:
        return unit_rows(F.embedding(tokens, self.weight, self.padding_idx))


class UnitProjection(nn.Module):
    """``x @ unit(weight)^T``, ``(..., dim)`` to ``(..., rows)``; ``weight`` may be shared."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, unit_rows(self.weight))
