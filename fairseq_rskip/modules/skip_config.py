"""The options of the skip connection, as fairseq reads them from the command line or from hydra."""

import math
from dataclasses import dataclass, field

from fairseq.dataclass import ChoiceEnum, FairseqDataclass

from fairseq_rskip.errors import UserError
from fairseq_rskip.norms import NORMS
from fairseq_rskip.residual import KINDS, SkipConnection

FP16_MAX = 65504.0
FP16_MARGIN = 100  # activations themselves reach tens


@dataclass
class SkipConfig(FairseqDataclass):
    """Which skip connection every residual of the model is; each architecture sets its own defaults."""

    skip_kind: ChoiceEnum(list(KINDS)) = field(
        default="rskip",
        metadata={
            "help": "skip connection: xskip y=G(λx+αF(x)); rskip y_1=G_1(x+αF(x)), y_k=G_k(x+y_{k-1}), y=y_λ; "
            "wskip y=G(w⊙x+αF(x)), w learned"
        },
    )
    skip_lambda: float = field(
        default=2.0,
        metadata={
            "help": "λ: scale of x in xskip (any real > 0), number of recursive steps in rskip (integer ≥ 1); "
            "1 is the plain skip (architectures default to 2, wskip has none)"
        },
    )
    skip_norm: ChoiceEnum(list(NORMS)) = field(
        default="layer",
        metadata={"help": "normalisation G after the skip: layer, batch (padding is not counted) or none"},
    )
    skip_branch_scale: float = field(
        default=1.0,
        metadata={"help": "α: scale of the residual branch F(x) (paper, Table 3: 2, 3); in rskip of its first step"},
    )
    skip_init: float = field(
        default=1.0, metadata={"help": "value at which the learned vector w of wskip starts (paper, section 4.3: 1, 2)"}
    )

    def build(self, dim: int, update_in_no_grad: bool = True) -> SkipConnection:
        """A skip connection over ``dim`` features; ``ValueError`` where the options are invalid."""
        return SkipConnection(
            dim,
            kind=str(self.skip_kind),
            skip_lambda=self.skip_lambda,
            norm=str(self.skip_norm),
            branch_scale=self.skip_branch_scale,
            init=self.skip_init,
            update_in_no_grad=update_in_no_grad,
        )

    def check(self, arch: str, pre_norm: bool) -> None:
        """Raise :class:`~fairseq_rskip.compat.UserError` where options contradict each other or the architecture."""
        chosen = (
            f"--arch {arch} with --skip-kind {self.skip_kind} --skip-norm {self.skip_norm} "
            f"--skip-lambda {self.skip_lambda:g} --skip-branch-scale {self.skip_branch_scale:g} "
            f"--skip-init {self.skip_init:g}"
        )
        try:
            skip = self.build(1)
        except ValueError as error:
            raise UserError(f"{chosen}: {error}") from None
        if pre_norm and self.skip_norm != "none":
            raise UserError(
                f"{chosen}: --encoder-normalize-before and --decoder-normalize-before mean y = λx + αF(LN(x)), without "
                "a normalisation after the skip: add --skip-norm none with --skip-kind xskip or wskip, or drop them"
            )
        if self.skip_lambda != 1 and not skip.takes_lambda:
            raise UserError(f"{chosen}: {self.skip_kind} learns the scale of x and has no λ: leave --skip-lambda at 1")
        if self.skip_init != 1 and not skip.takes_init:
            raise UserError(f"{chosen}: {self.skip_kind} has nothing that --skip-init would start: leave it at 1")

    def growth_warning(self, encoder_skips: int, decoder_skips: int) -> str:
        """One line on the growth λ^(number of skips) of a stream without a norm, or "" where x does not grow."""
        scale = self.build(1).skip_scale()
        if self.skip_norm != "none" or scale <= 1:
            return ""
        encoder, decoder = (_power(scale, n) for n in (encoder_skips, decoder_skips))
        largest = max(encoder, decoder)
        verdict = "overflows" if largest > FP16_MAX else "comes close to the limit of"
        if largest < FP16_MAX / FP16_MARGIN:
            verdict = "is within"
        return (
            f"a skip scaled by {scale:g} without a normalisation grows with depth: about {scale:g}^{encoder_skips} = "
            f"{encoder:.3g} through the encoder and {scale:g}^{decoder_skips} = {decoder:.3g} through the decoder. "
            f"That {verdict} fp16 (largest value {FP16_MAX:g}); the way out is fp32, or --skip-norm layer"
        )


def _power(base: float, exponent: int) -> float:
    """``base ** exponent``, infinite where Python would raise ``OverflowError``."""
    return base**exponent if exponent * math.log(base) < 700 else math.inf
