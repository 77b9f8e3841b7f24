"""The length penalties of tensor2tensor and of fairseq, and how one stands for the other.

Both divide a hypothesis' log-probability by a function f of its length, the end-of-sentence token counted. All that the
choice between hypotheses of about L tokens sees of f is its elasticity there, d log f / d log L.
"""


def tensor2tensor_penalty(length: float, alpha: float) -> float:
    """((5 + length) / 6)^alpha (Wu et al. 2016, equation 14); its elasticity is alpha * length / (length + 5)."""
    return ((5 + length) / 6) ** alpha


def fairseq_penalty(length: float, lenpen: float) -> float:
    """length^lenpen; its elasticity is lenpen at every length."""
    return length**lenpen


def equivalent_lenpen(alpha: float, length: float) -> float:
    """The ``--lenpen`` that weighs hypotheses of about ``length`` tokens as tensor2tensor's ``alpha`` does."""
    return alpha * length / (length + 5)


PAPER_ALPHA = 0.6
TYPICAL_LENGTH = 25  # subwords in a translated sentence, about; docs/evaluation.md has the value at other lengths
DEFAULT_LENPEN = equivalent_lenpen(PAPER_ALPHA, TYPICAL_LENGTH)
