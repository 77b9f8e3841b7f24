"""The learning rate of an iteration: warm-up, then steps (He et al. 2016b: 0.01, 0.1, 0.01, 0.001)."""

from typing import Sequence


def learning_rate(
    iteration: int, base: float, warmup: float, warmup_iterations: int, milestones: Sequence[int], factor: float
) -> float:
    """The rate for update number ``iteration``, counted from 0.

    ``warmup`` for the first ``warmup_iterations``, then ``base``, multiplied by ``factor`` at each of ``milestones``.
    """
    if iteration < warmup_iterations:
        return warmup
    rate = base * factor ** sum(iteration >= milestone for milestone in milestones)
    return float(f"{rate:.12g}")  # 0.1 * 0.1 is 0.01, not 0.010000000000000002
