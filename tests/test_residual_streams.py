"""Rules that keep more than one tensor: whole stacks against their equations, and what each is at its start.

The references share nothing with the package: elementary sums in float64, gradients through autograd.
"""

import copy
from typing import Any, Callable, Dict, List, NamedTuple

import pytest
import torch
from skip_variants import draw, gradients
from torch import Tensor, nn
from torch.autograd import gradcheck

from fairseq_rskip.residual import Place, SkipConnection

EPS = 1e-5


class Blocks(NamedTuple):
    """What a reference is given: the branches F_k, the shape of the stack and the parameters by block and name."""

    branches: List[Callable[[Tensor], Tensor]]
    depth: int
    sublayers: int
    parameters: Dict[str, Tensor]

    def get(self, k: int, name: str) -> Tensor:
        return self.parameters[f"skips.{k}.{name}"]

    def norm(self, k: int, name: str, z: Tensor) -> Tensor:
        mean = z.sum(-1, keepdim=True) / z.size(-1)
        var = ((z - mean) * (z - mean)).sum(-1, keepdim=True) / z.size(-1)
        return (z - mean) / (var + EPS) ** 0.5 * self.get(k, f"{name}.weight") + self.get(k, f"{name}.bias")

    def branch(self, k: int, z: Tensor) -> Tensor:
        """F of the normalised z."""
        return self.branches[k](self.norm(k, "pre_norm", z))


def b2t(x: Tensor, blocks: Blocks) -> Tensor:
    for layer in range(blocks.depth):
        x0 = x
        for position in range(blocks.sublayers):
            k = layer * blocks.sublayers + position
            z = x + blocks.branches[k](x)
            if 0 < position == blocks.sublayers - 1:
                z = x0 + z
            x = blocks.norm(k, "norms.0", z)
    return x


def residual_dual(x: Tensor, blocks: Blocks) -> Tensor:
    r = x
    for k, branch in enumerate(blocks.branches):
        f = branch(x)
        x, r = blocks.norm(k, "norms.0", x + f), r + f
    return x + blocks.norm(len(blocks.branches) - 1, "norms.1", r)


def x0(x: Tensor, blocks: Blocks) -> Tensor:
    first = x
    for k in range(len(blocks.branches)):
        x = blocks.get(k, "r") * x + blocks.branch(k, x) + blocks.get(k, "s") * first
    return x


class Rule(NamedTuple):
    options: Dict[str, Any]
    equation: Callable[[Tensor, Blocks], Tensor]
    at_least: int = 1  # parameters of the rule's own in a stack of two layers


RULES = {
    "b2t": Rule({"kind": "b2t"}, b2t),
    "residual_dual": Rule({"kind": "residual_dual"}, residual_dual),
    "x0": Rule({"kind": "x0"}, x0),
}
SHAPES = {"one block": (1, 1), "one layer": (1, 2), "encoder": (2, 2), "decoder": (2, 3)}


class Stack(nn.Module):
    """``depth`` layers of ``sublayers`` blocks; the branch of block k is ``tanh(z W_k)`` with W_k constant."""

    def __init__(self, rule: str, depth: int = 2, sublayers: int = 2, dim: int = 5, **options: Any):
        super().__init__()
        self.depth, self.sublayers, blocks = depth, sublayers, depth * sublayers
        places = [Place("encoder", "ffn", k // sublayers, depth, 0, k % sublayers, sublayers) for k in range(blocks)]
        options = {**RULES[rule].options, **options}
        self.skips = nn.ModuleList(SkipConnection(dim, place=place, **options) for place in places)
        self.weights = [draw((dim, dim), 50 + k) for k in range(blocks)]

    def randomise(self) -> "Stack":
        """Every parameter off its start: no gain is 1, no bias and no mixing weight is 0."""
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(0.5, 1.5, generator=generator)
        return self

    def branch(self, k: int) -> Callable[[Tensor], Tensor]:
        return lambda z: torch.tanh(z @ self.weights[k].to(z.dtype))

    def forward(self, x: Tensor, padding_mask=None) -> Tensor:
        for k, skip in enumerate(self.skips):
            x = skip(x, self.branch(k)(skip.read(x)), padding_mask)
        return x

    def blocks(self) -> Blocks:
        """For a reference: float64 leaf copies of all parameters."""
        parameters = {name: p.detach().double().requires_grad_() for name, p in self.named_parameters()}
        return Blocks([self.branch(k) for k in range(len(self.skips))], self.depth, self.sublayers, parameters)


def pre_norm(x: Tensor, blocks: Blocks) -> Tensor:
    """The plain pre-norm stack x + F(G(x))."""
    for k in range(len(blocks.branches)):
        x = x + blocks.branch(k, x)
    return x


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_a_stack_is_its_equation_with_all_gradients(rule, shape):
    stack = Stack(rule, *SHAPES[shape]).randomise().double()
    x, upstream, blocks = draw((4, 3, 5), 1).requires_grad_(), draw((4, 3, 5), 2), stack.blocks()
    y, expected = stack(x), RULES[rule].equation(x, blocks)
    assert y.shape == x.shape
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    ours = gradients(y, upstream, [x, *stack.parameters()])
    theirs = gradients(expected, upstream, [x, *blocks.parameters.values()])
    for name, a, b in zip(["x", *blocks.parameters], ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("rule", RULES)
def test_gradcheck_float64(rule):
    stack = Stack(rule, 2, 2, dim=3).randomise().double()
    x = draw((2, 3), 1).requires_grad_()
    assert gradcheck(lambda x, *parameters: stack(x), (x, *stack.parameters()))


@pytest.mark.parametrize("half_module", [True, False], ids=["half-module", "fp32-module"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float16, 0.02), (torch.bfloat16, 0.15), (torch.float32, 1e-5)],
    ids=["fp16", "bf16", "fp32"],
)
@pytest.mark.parametrize("rule", RULES)
def test_half_precision(rule, dtype, tolerance, half_module):
    """Against float64 on the same rounded inputs; a stack's rounding grows with its largest value."""
    stack = Stack(rule, 2, 3, dim=33).randomise()
    stack = stack.to(dtype) if half_module else stack
    x = draw((5, 33), 1, dtype)
    y, expected = stack(x), RULES[rule].equation(x.double(), stack.blocks())
    assert y.dtype == dtype and stack.skips[1].read(stack.skips[0](x, x)).dtype == dtype
    assert (y.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("rule", RULES)
def test_under_autocast_the_stream_keeps_its_type(rule):
    stack = Stack(rule, 2, 2).randomise()
    x = draw((4, 5), 1, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = stack(x)
    expected = RULES[rule].equation(x.double(), stack.blocks())
    assert y.dtype == torch.float32 and (y - expected).abs().max() <= 0.03 * expected.abs().max()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_and_compiled_blocks_say_the_same(rule):
    torch._dynamo.reset()
    stack = Stack(rule, 2, 3).randomise().requires_grad_(False)
    scripted, compiled = copy.deepcopy(stack), copy.deepcopy(stack)
    for k, skip in enumerate(stack.skips):
        scripted.skips[k] = torch.jit.script(_Block(skip))
        compiled.skips[k] = torch.compile(_Block(skip), backend="eager", fullgraph=True)
    x, mask = draw((4, 3, 5), 1, torch.float32), torch.zeros(4, 3).bool()
    for twin in (scripted, compiled):
        y = x
        for k, block in enumerate(twin.skips):
            y = block(y, stack.weights[k].float(), mask)
        torch.testing.assert_close(y, stack(x, mask))


class _Block(nn.Module):
    """A block of a :class:`Stack` with its branch, as one module."""

    def __init__(self, skip: SkipConnection):
        super().__init__()
        self.skip = skip

    def forward(self, x: Tensor, weight: Tensor, padding_mask: Tensor) -> Tensor:
        return self.skip(x, torch.tanh(self.skip.read(x) @ weight), padding_mask)


@pytest.mark.parametrize("rule", RULES)
def test_what_padding_holds_reaches_no_other_position(rule):
    stack, mask = Stack(rule).randomise(), torch.zeros(4, 3).bool()
    mask[1, 0] = mask[3, 2] = True
    x = draw((4, 3, 5), 1, torch.float32)
    clean, poisoned = (stack(x.masked_fill(mask.unsqueeze(-1), fill), mask) for fill in (0.0, float("nan")))
    assert torch.equal(clean[~mask], poisoned[~mask])


def test_b2t_with_a_branch_of_zero_is_a_recursive_skip():
    stack = Stack("b2t", 1, 2).randomise().double()
    recursive = SkipConnection(5, "rskip", skip_lambda=2, norm="layer").double()
    recursive.norms.load_state_dict(
        {f"{k}.{name}": p for k in (0, 1) for name, p in stack.skips[k].norms[0].named_parameters()}
    )
    x, f = draw((4, 5), 1), draw((4, 5), 2)
    first = stack.skips[0](x, f)
    assert torch.equal(stack.skips[1](first, torch.zeros_like(f)), recursive(x, f))


def test_residual_dual_of_one_block_is_twice_post_norm():
    x, f = draw((4, 5), 1), draw((4, 5), 2)
    skip = SkipConnection(5, "residual_dual").double()
    torch.testing.assert_close(skip(x, f), 2 * torch.layer_norm(x + f, [5]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", ["x0"])
def test_at_the_start_a_stack_is_plain_pre_norm(rule):
    stack, x = Stack(rule, 2, 3).double(), draw((4, 5), 1)
    torch.testing.assert_close(stack(x), pre_norm(x, stack.blocks()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_wrong_inputs_are_refused_with_the_sizes(rule):
    stack = Stack(rule, 2, 3)
    skip = stack.skips[1]
    wide = skip.width_in * 5
    with pytest.raises(ValueError, match=rf"x has shape \[4, {wide + 1}\]: expected {wide} at dimension -1"):
        skip(torch.zeros(4, wide + 1), torch.zeros(4, 5))
    with pytest.raises(ValueError, match=r"f_x has shape \[4, 6\]: expected x's shape \[4, 5\]"):
        skip(torch.zeros(4, wide), torch.zeros(4, 6))
    with pytest.raises(ValueError, match="no coefficient of x and of F"):
        skip.coefficients(torch.zeros(4, wide), torch.zeros(4, 5))
    with pytest.raises(ValueError, match="for images"):
        SkipConnection(5, channel_dim=1, **RULES[rule].options)
