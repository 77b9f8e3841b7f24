"""The range of fp16: how a stream grows with depth, and which block leaves the range."""

import logging
import math
from typing import Any

from torch import Tensor

from fairseq_rskip.modules.skip_log import loss_scale
from fairseq_rskip.residual import SkipConnection, skips

logger = logging.getLogger(__name__)

FP16_MAX = 65504.0
FP16_MARGIN = 100  # activations themselves reach tens


def _growth(skip: SkipConnection) -> float:
    """The factor by which a sum lets the stream grow; 1 where a norm follows the sum."""
    return 1.0 if len(skip.post) else skip.stream_gain()


def growth(sides: dict[str, list[SkipConnection]]) -> tuple[int, str]:
    """One line on how a stream without a norm after the sum grows with depth, or "".

    Before it comes the level to log it with: a warning, unless fp16 holds the stream.
    """
    every = [skip for skips in sides.values() for skip in skips]
    if any(parameter.is_meta for skip in every for parameter in skip.parameters()):
        return logging.INFO, ""
    gains = {side: [_growth(skip) for skip in skips] for side, skips in sides.items() if skips}
    fastest = max(every, key=_growth, default=None)
    if fastest is None:
        return logging.INFO, ""
    scale = _growth(fastest)
    if scale <= 1:
        return logging.INFO, ""

    largest = 0.0
    stacks = []
    for side, own in gains.items():
        product = math.prod(own)
        largest = max(largest, product)
        alike = min(own) == max(own)
        factors = f"{own[0]:g}^{len(own)}" if alike else f"{own[0]:g} ... {own[-1]:g}"
        stacks.append(f"{factors} = {product:.3g} through the {side}")
    through = " and ".join(stacks)

    grows = f"a skip scaled by {scale:g} without a normalisation grows with depth: about {through}"
    if largest < FP16_MAX / FP16_MARGIN:
        return logging.INFO, f"{grows}. That is within fp16 (largest value {FP16_MAX:g})"
    verdict = "overflows" if largest > FP16_MAX else "comes close to the limit of"
    return logging.WARNING, (
        f"{grows}. That {verdict} fp16 (largest value {FP16_MAX:g}); "
        f"the way out is {way_out(fastest)}"
    )


def way_out(skip: SkipConnection) -> str:
    """What keeps the stream of ``skip`` within fp16's range."""
    ways = ["fp32 or bf16"]
    if "post" in skip.slots and not len(skip.post) and skip.pre is None:
        ways.append("--skip-norm layer")
    if hasattr(skip.options, "skip_lambda"):
        ways.append("a smaller --skip-lambda")
    return ", or ".join(ways)


class OverflowWatch:
    """A task's ``train_step`` that looks for the block that leaves fp16's range.

    It looks when fp16's loss scale has fallen. The first block, in the order of computation, whose
    output is above half of fp16's largest value or not finite is named in one warning, with the
    cure. While the scale does not fall, an update costs nothing with ``--fp16``, and one wait for
    the device with ``--amp``, whose scale is there.
    """

    def __init__(self, train_step: Any, model: Any):
        self.train_step, self.model, self.scale, self.named = train_step, model, 0.0, False

    def __call__(self, sample, model, criterion, optimizer, *arguments, **options):
        before, self.scale = self.scale, loss_scale(optimizer)
        if self.named or not self.scale < before:
            return self.train_step(sample, model, criterion, optimizer, *arguments, **options)
        largest: dict[Any, Tensor] = {}

        def note(skip: Any, _args: Any, y: Tensor) -> None:
            largest[skip] = y.detach().abs().max()

        handles = [skip.register_forward_hook(note) for skip in skips(self.model).values()]
        try:
            return self.train_step(sample, model, criterion, optimizer, *arguments, **options)
        finally:
            for handle in handles:
                handle.remove()
            self.warn(largest)

    def warn(self, largest: dict[Any, Tensor]) -> None:
        names = {skip: name for name, skip in skips(self.model).items()}
        for skip, value in largest.items():
            if not value < FP16_MAX / 2:
                self.named = True
                reached = (
                    f"the output of {names[skip]} reaches {value:.3g}, fp16 ends at {FP16_MAX:g}"
                )
                logger.warning(f"{reached}: expected {way_out(skip)}")
                return
