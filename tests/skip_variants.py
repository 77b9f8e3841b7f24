"""Every skip variant with its equation written out, and float64 normalisations made of elementary sums.

The references share nothing with the package: gradients come from autograd through plain arithmetic in float64.
"""

from typing import Callable, List, NamedTuple, Optional

import torch
from torch import Tensor

from fairseq_rskip.residual import SkipConnection

Equation = Callable[[Tensor, Tensor, List[Callable[[Tensor], Tensor]], Optional[Tensor]], Tensor]


class Variant(NamedTuple):
    """Options of one skip connection, its equation ``y(x, F, G, w)`` and its number of parameter vectors."""

    kind: str
    skip_lambda: float
    norm: str
    branch_scale: float
    vectors: int
    equation: Equation

    def build(self, dim: int, seed: int = 0, **options) -> SkipConnection:
        """The variant with every parameter drawn at random, so that no gain is 1 and no bias is 0."""
        options = {"init": 2.0, **options}
        skip = SkipConnection(dim, self.kind, self.skip_lambda, self.norm, self.branch_scale, **options)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in skip.parameters():
                parameter.uniform_(0.5, 1.5, generator=generator)
        return skip

    def sums_exactly(self) -> bool:
        """Whether G's input is x plus an integer multiple of F (w set to 1), so that integers stay integers."""
        integer = self.skip_lambda == 1 and self.branch_scale in (1.0, 2.0)
        return integer and self.norm != "none" and self.kind in ("xskip", "rskip", "wskip")

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.skip_lambda}-{self.norm}-alpha{self.branch_scale:g}"


VARIANTS = [
    Variant("xskip", 1, "none", 1.0, 0, lambda x, f, g, w: x + f),
    Variant("xskip", 2.5, "none", 1.0, 0, lambda x, f, g, w: 2.5 * x + f),
    Variant("xskip", 0.5, "none", 3.0, 0, lambda x, f, g, w: 0.5 * x + 3 * f),
    Variant("xskip", 2, "layer", 1.0, 2, lambda x, f, g, w: g[0](2 * x + f)),
    Variant("xskip", 1, "layer", 2.0, 2, lambda x, f, g, w: g[0](x + 2 * f)),
    Variant("xskip", 3, "batch", 0.5, 2, lambda x, f, g, w: g[0](3 * x + 0.5 * f)),
    Variant("rskip", 1, "layer", 1.0, 2, lambda x, f, g, w: g[0](x + f)),
    Variant("rskip", 2, "layer", 1.0, 4, lambda x, f, g, w: g[1](x + g[0](x + f))),
    Variant("rskip", 3, "layer", 0.5, 6, lambda x, f, g, w: g[2](x + g[1](x + g[0](x + 0.5 * f)))),
    Variant("rskip", 2, "batch", 1.0, 4, lambda x, f, g, w: g[1](x + g[0](x + f))),
    Variant("rskip", 3, "batch", 2.0, 6, lambda x, f, g, w: g[2](x + g[1](x + g[0](x + 2 * f)))),
    Variant("wskip", 1, "none", 1.0, 1, lambda x, f, g, w: w * x + f),
    Variant("wskip", 2, "layer", 1.0, 3, lambda x, f, g, w: g[0](w * x + f)),
    Variant("wskip", 1, "batch", 2.0, 3, lambda x, f, g, w: g[0](w * x + 2 * f)),
]
NAMES = [variant.name for variant in VARIANTS]
SEQUENCE, IMAGE = (4, 3, 5), (2, 5, 3, 2)


class Case(NamedTuple):
    """A variant on one layout, with or without padding."""

    variant: Variant
    shape: tuple
    axes: str = "c"
    masked: bool = False

    @property
    def channel_dim(self) -> int:
        return 1 if len(self.shape) == 4 else -1

    def build(self, **options) -> SkipConnection:
        dim = self.shape[self.channel_dim]
        return self.variant.build(dim, channel_dim=self.channel_dim, norm_axes=self.axes, **options)

    def mask(self) -> Optional[Tensor]:
        """A third of the positions or fewer, never all but one."""
        if not self.masked:
            return None
        shape = list(self.shape)
        shape.pop(self.channel_dim)
        padded = torch.zeros(shape).flatten()
        padded[1::3] = 1
        return padded.bool().view(shape)

    @property
    def name(self) -> str:
        layout = {-1: "sequence", 1: f"image-{self.axes}"}[self.channel_dim]
        return f"{self.variant.name}-{layout}{'-masked' if self.masked else ''}"


CASES = [Case(v, shape, "c", masked) for v in VARIANTS for shape in (SEQUENCE, IMAGE) for masked in (False, True)]
CASES += [Case(v, IMAGE, "chw") for v in VARIANTS if v.norm == "layer"]
CASE_NAMES = [case.name for case in CASES]


def draw(shape, seed: int, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def to_rows(x: Tensor, channel_dim: int) -> Tensor:
    return x.movedim(channel_dim, -1).reshape(-1, x.size(channel_dim))


def from_rows(rows: Tensor, like: Tensor, channel_dim: int) -> Tensor:
    return rows.view(like.movedim(channel_dim, -1).shape).movedim(-1, channel_dim)


def _standardise(cell: Tensor, eps: float, freeze: bool) -> Tensor:
    mean = cell.sum() / cell.numel()
    var = ((cell - mean) * (cell - mean)).sum() / cell.numel()
    if freeze:
        mean, var = mean.detach(), var.detach()
    return (cell - mean) / (var + eps) ** 0.5


def reference_norm(case: Case, gain: Tensor, bias: Tensor, freeze: bool = False, eps: float = 1e-5):
    """G on rows ``(positions, dim)``, one cell of shared statistics at a time; ``freeze`` makes those constants."""
    mask = case.mask()
    keep = None if mask is None else (~mask).flatten().nonzero().flatten()

    def layer(z: Tensor) -> Tensor:
        rows_per_cell = len(z) // case.shape[0] if case.axes == "chw" else 1
        return torch.cat([_standardise(cell, eps, freeze) for cell in z.split(rows_per_cell)]) * gain + bias

    def batch(z: Tensor) -> Tensor:
        kept = z if keep is None else z[keep]
        columns = [_standardise(column, eps, freeze) for column in kept.unbind(1)]
        y = torch.stack(columns, 1) * gain + bias
        return y if keep is None else torch.zeros_like(z).index_copy(0, keep, y)

    return {"layer": layer, "batch": batch}[case.variant.norm]


def reference(case: Case, skip: SkipConnection, x: Tensor, f: Tensor, parameters: dict, freeze: bool = False) -> Tensor:
    """The variant's equation in float64; ``parameters`` by name, as ``skip.named_parameters()`` has them."""
    norms = [
        reference_norm(case, parameters[f"norms.{k}.weight"], parameters[f"norms.{k}.bias"], freeze)
        for k in range(len(skip.norms))
    ]
    rows, f_rows = to_rows(x, case.channel_dim), to_rows(f, case.channel_dim)
    return from_rows(case.variant.equation(rows, f_rows, norms, parameters.get("weight")), x, case.channel_dim)


def gradients(y: Tensor, upstream: Tensor, tensors) -> List[Tensor]:
    return [torch.zeros_like(t) if g is None else g for t, g in
            zip(tensors, torch.autograd.grad(y, tensors, upstream, allow_unused=True))]
