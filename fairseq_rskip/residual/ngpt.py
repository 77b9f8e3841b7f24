"""nGPT: every vector has the same length, and the sum is a step on the sphere."""

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..norms import at_least_float32
from .base import Common, SkipConnection
from .branch_weights import BranchWeights, Weight
from .inputs import refuse_drop_path
from .registry import register

LENGTH_TOLERANCE = 0.01  # bf16 rounds an entry by up to 0.4 %


@register("ngpt", also=("normalized Transformer",))
class NGPT(SkipConnection):
    """nGPT's residual, ``y = N(N(x) + a * (N(F(N(x))) - N(x)))``, N(z) = sqrt(dim) z / |z|.

    nGPT's vectors have length 1; here their entries have size 1, which fairseq's sublayers expect.
    Loshchilov et al. 2024, "nGPT: Normalized Transformer with Representation Learning on the
    Hypersphere", arXiv 2410.01131, and code NVIDIA/ngpt.

    a, ``|weight| * 0.05 sqrt(dim)`` with ``weight`` at 1/sqrt(dim), is 0.05 at first. Every vector
    of the branch's matrices along the model's dimension has length 1: under fairseq this is done
    after each update; in your own loop call :meth:`to_unit_length` there, or a warning says that
    the lengths have changed. The matrices are those given to ``initialise``, so whatever replaces
    parameters (FSDP, ``load_state_dict(assign=True)``) is not supported. The architectures have
    FixNorm: the output's rows have length 1 in the product, where nGPT gives the embedding length 1
    after each update, and the logits a fixed factor sqrt(dim), there learned for each token from 1.
    nGPT's normalised queries and keys, and its learned scales of these and of hidden units, are
    left out: they are not part of a skip connection.
    """

    norms = ("none",)
    default_norm = "none"
    slots = ()
    for_images = False
    starts_branch = True
    has_unit_length = True
    normalises_x = True

    def __init__(self, dim: int, **common: Unpack[Common]):
        super().__init__(dim, **common)
        refuse_drop_path(self)
        self.weight = self.new_parameter(torch.full((dim,), dim**-0.5))
        self.lr_multiplier = 0.05 * dim**0.5
        # the branch's matrices, each with the axis of the model's dimension
        self.matrices: list[tuple[Weight, int]] = []
        self.versions: list[int] = []  # of the matrices when their lengths were last known
        self.lengths_were_warned_of = False

    def initialise(self, weights: BranchWeights) -> None:
        """Give the branch's vectors length 1, and know its matrices.

        A training that is resumed calls this, too, before or after ``load_state_dict``. Raises
        ``ValueError`` for a tensor that is no parameter: ``.to(device)`` would leave it behind.
        """
        super().initialise(weights)
        known = {(id(matrix.parameter), matrix.rows.start) for matrix, _ in self.matrices}
        for role, weight in weights.items():
            if role == "embedding":  # it is passed separately
                continue
            if not isinstance(weight.parameter, nn.Parameter):
                raise ValueError(
                    f"initialise: {role!r} is a {type(weight.parameter).__name__}: expected "
                    "Weight(parameter, std), with rows=slice(...) for a part of a parameter"
                )
            if (id(weight.parameter), weight.rows.start) not in known:
                self.matrices.append((weight, 0 if role in ("out", "fc2") else 1))
        self.to_unit_length()

    def missing_setup(self) -> str:
        if self.matrices:
            return ""
        return (
            "to_unit_length does not know the branch's matrices; call initialise({role: "
            "Weight(parameter, std), ...}) once in each process, also in one that resumes"
        )

    @torch.no_grad()
    def to_unit_length(self, copies: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        """Give the branch's vectors length 1."""
        for matrix, axis in self.matrices:
            updated = copies.get(id(matrix.parameter), matrix.parameter)[matrix.rows]
            updated.div_(updated.norm(dim=axis, keepdim=True).clamp(min=self.eps))
            matrix.tensor.copy_(updated)
        self.versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        """torch's count of the changes in place of each matrix."""
        return [matrix.parameter._version for matrix, _ in self.matrices]

    def _warn_of_lengths(self) -> None:
        """Warn once if an update has changed the lengths and nobody has restored them."""
        versions = self._versions_now()
        if self.lengths_were_warned_of or versions == self.versions:
            return
        self.versions = versions
        lengths = torch.cat(
            [matrix.tensor.float().norm(dim=axis) for matrix, axis in self.matrices]
        )
        off = torch.where(lengths > 0, lengths - 1.0, 0.0)  # a vector of zeros stays one
        furthest = float(off.abs().max())
        if furthest > LENGTH_TOLERANCE:
            self.lengths_were_warned_of = True
            warnings.warn(
                f"kind {self.kind}: vectors of the branch's matrices are {furthest:.0%} longer or "
                "shorter than 1; call to_unit_length() after each update",
                RuntimeWarning,
                stacklevel=3,  # past prepare, to the caller
            )

    def unit(self, z: Tensor) -> Tensor:
        return nn.functional.normalize(at_least_float32(z), dim=-1, eps=self.eps) * self.dim**0.5

    def prepare(self, x: Tensor) -> tuple[Tensor, None]:
        if self.training and not torch.compiler.is_compiling():
            self._warn_of_lengths()
        h, _ = super().prepare(x)
        return self.unit(h).to(x.dtype), None

    def combine(self, x: Tensor, f_x: Tensor, carried: Any) -> Tensor:
        x = self.unit(x)
        share = (self.lr_multiplier * self.weight).abs()
        return self.unit(x + share * (self.unit(f_x) - x))
