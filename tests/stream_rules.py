"""The rules that keep more than one tensor, each with its equation of a whole stack.

``Stack`` is such a stack of the package's.
"""

from collections.abc import Callable
from typing import Any

import torch
from depth_equations import (
    attnres,
    b2t,
    by_layers,
    delta_attnres,
    dlcl,
    mhar,
    mudd,
    residual_dual,
    siamesenorm,
    spannorm,
    x0,
)
from hyper_equations import (
    cayley,
    fractional,
    gated_residual,
    hyper,
    ihc,
    kronecker,
    mhc,
    multi_gate,
    permutations,
    quaternions,
    single_pass_mhc,
)
from skip_variants import draw
from stream_blocks import Blocks
from torch import Tensor, nn

from fairseq_rskip.residual import Place, create_skip


def pre_norm(x: Tensor, blocks: Blocks) -> Tensor:
    """The plain pre-norm stack x + F(G(x))."""
    for k in range(len(blocks.branches)):
        x = x + blocks.branch(k, x)
    return x


# name -> options, equation
RULES: dict[str, tuple[dict[str, Any], Callable[[Tensor, Blocks], Tensor]]] = {
    "b2t": ({}, b2t),
    "residual_dual": ({}, residual_dual),
    "x0": ({}, x0),
    "siamesenorm": ({}, siamesenorm),
    "dlcl": ({}, dlcl),
    "denseformer": ({}, lambda x, blocks: by_layers(x, x, blocks)),
    "attnres": ({}, attnres),
    "attnres-blocks": (
        {"kind": "attnres", "block_size": 2},
        lambda x, blocks: attnres(x, blocks, 2),
    ),
    "mhar": ({"heads": 3}, lambda x, blocks: mhar(x, blocks, 3)),
    "mhar-blocks": (
        {"kind": "mhar", "heads": 3, "temperature": 2.0, "block_size": 2},
        lambda x, blocks: mhar(x, blocks, 3, 2.0, 2),
    ),
    "delta_attnres": ({}, delta_attnres),
    "delta_attnres-zero": ({"kind": "delta_attnres", "depth_gate": "zero"}, delta_attnres),
    "mudd": ({}, mudd),
    "spannorm": ({}, spannorm),
    "ihc": ({"streams": 3}, ihc),
    "gated_residual": ({"streams": 3, "gate_rank": 2}, gated_residual),
    "hyper": ({"streams": 3}, hyper),
    "hyper-static": ({"kind": "hyper", "streams": 4, "mixing": "static"}, hyper),
    "fractional": ({"parts": 3}, fractional),
    "mhc": ({"streams": 3}, mhc),
    "single_pass_mhc": ({"streams": 3}, single_pass_mhc),
    "single_pass_mhc-lite": (
        {"kind": "single_pass_mhc", "streams": 3, "matrix": "permutations"},
        lambda x, b: single_pass_mhc(x, b, permutations),
    ),
    "mhc-lite": (
        {"kind": "mhc", "streams": 3, "matrix": "permutations"},
        lambda x, b: mhc(x, b, permutations),
    ),
    "kromhc": (
        {"kind": "mhc", "streams": 4, "matrix": "kronecker"},
        lambda x, b: mhc(x, b, kronecker),
    ),
    "ohc": (
        {"kind": "mhc", "streams": 4, "matrix": "quaternions"},
        lambda x, b: mhc(x, b, quaternions),
    ),
    "jpmhc": (
        {"kind": "mhc", "streams": 3, "matrix": "cayley"},
        lambda x, b: mhc(x, b, cayley),
    ),
    "multi_gate": ({"streams": 3}, lambda x, b: multi_gate(x, b, 3)),
}
RULES = {name: ({"kind": name, **options}, equation) for name, (options, equation) in RULES.items()}


class Stack(nn.Module):
    """``depth`` layers of ``sublayers`` blocks.

    The branch of block k is ``tanh(z W_k)`` with W_k constant.
    """

    def __init__(self, rule: str, depth: int = 2, sublayers: int = 2, dim: int = 9, **options: Any):
        super().__init__()
        self.depth, self.sublayers, blocks = depth, sublayers, depth * sublayers
        places = [
            Place("encoder", "ffn", k // sublayers, depth, 0, k % sublayers, sublayers)
            for k in range(blocks)
        ]
        options = {**RULES[rule][0], **options}
        self.turns = options.get("matrix") in ("quaternions", "cayley")
        self.ends_with_gate = options["kind"] == "single_pass_mhc"
        self.skips = nn.ModuleList(create_skip(dim=dim, place=place, **options) for place in places)
        # beside streams that do not grow, or turn, rounding inside of a steep branch would count
        # more
        steepness = 0.25 if rule in ("multi_gate", "ohc") else 1.0
        self.weights = [steepness * draw((dim, dim), 50 + k) for k in range(blocks)]

    def randomise(self) -> "Stack":
        """Every parameter off its start: no gain is 1, no bias and no mixing weight is 0."""
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.uniform_(0.5, 1.5, generator=generator)
                if name.split(".", 2)[2] in ("r", "s", "a_r", "a_m", "b", "first_weight"):
                    signs = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
                    parameter.mul_(signs)
                if name.endswith(("query", "w1", "w2", "gate_down", "gate_weight")):
                    parameter.mul_(0.2)  # a sharp softmax amplifies rounding
                if name.endswith("phi_res") and self.turns:
                    parameter.mul_(0.02)  # and so does the direction of a short quaternion
                if name.endswith("phi_pre") and self.ends_with_gate:
                    parameter.mul_(0.2)  # and the tail of a sigmoid that multiplies the output
        return self

    def branch(self, k: int) -> Callable[[Tensor], Tensor]:
        return lambda z: torch.tanh(z @ self.weights[k].to(z.dtype))

    def forward(self, x: Tensor, padding_mask=None) -> Tensor:
        for k, skip in enumerate(self.skips):
            h, carried = skip.prepare(x)
            x = skip(x, self.branch(k)(h), carried, padding_mask)
        return x

    def blocks(self) -> Blocks:
        """For a reference: float64 leaf copies of all parameters."""
        parameters = {
            name: p.detach().double().requires_grad_() for name, p in self.named_parameters()
        }
        return Blocks(
            [self.branch(k) for k in range(len(self.skips))], self.depth, self.sublayers, parameters
        )


def copy_parameters(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Give each parameter of ``target`` the value that ``source`` has under its name."""
    values = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(values[name])
