"""Whole stacks against numbers that the code of wdlctc/hyper-connection-factory computed.

No package index has that repository: ``make_factory_values.py`` ran it and stored an input, all
parameters, outputs and gradients of the input in ``factory_values.pt``, which is all that is needed
here. Three layers of two sublayers ``tanh(G(x) W_k)``, float64, tolerance 1e-10, relative and
absolute, except where a test says otherwise.

Its norms are RMSNorms with eps 1e-6, but for the layer norm of its hyper-connections with 1e-5.
Differences from our rules:

- Attention residuals have a router before each sublayer and one for the output; the first sees one
  source. Our query is that of the block before. Its query times the gain of its keys is ours.
- The first block of its delta attention residuals reads x + g x, with g = 1 where there is no gate.
  G divides by the factor 1 + g: it is the norm of x with eps / (1 + g)^2, which is set here.
- MUDD has ``qkv=False``, the residual stream alone.
- mHC adds 1e-6 to p and to the sums of Sinkhorn's steps. The test adds it to our p;
  ``mhc-sinkhorn-without-eps`` has an eps of 0 in the steps, ``mhc`` is as published. The steps are
  in our order: its matrix, whose rows come first, is R^T. A head reads the stack's last streams
  with gates. Its alpha and bias are 0 in the stored numbers, so that each gate is 1/2 + 1e-6.
- The a and b of LAuReL are twice a softmax, and b multiplies its low-rank part, too. Our B is b
  times its own.

Not compared: the form of delta attention residuals with one source for a layer, MUDD's queries,
keys and values, and DenseFormer's dilation, which our rules leave out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fairseq_rskip.norms import create_norm
from fairseq_rskip.residual import SkipConnection, skip_stack

STORED = torch.load(Path(__file__).with_name("factory_values.pt"), weights_only=True)
DIM = 12
LAYERS = 3
STREAMS = 3
EPS = 1e-6
pytestmark = pytest.mark.usefixtures("stock_operators")

Parameters = dict[str, Tensor]


def no_parameters(theirs: Parameters, k: int) -> Parameters:
    return {}


def post_norm(theirs: Parameters, k: int) -> Parameters:
    return {"post.0.weight": theirs[f"norms.{k}.weight"]}


def router(theirs: Parameters, k: int) -> Parameters:
    prefix = f"routers.{k}"
    return {"query": theirs[f"{prefix}.query"] * theirs[f"{prefix}.key_norm_weight"]}


def next_router(theirs: Parameters, k: int) -> Parameters:
    return router(theirs, k + 1)


def delta(theirs: Parameters, k: int) -> Parameters:
    if k == 0:
        return {}
    gate = {"gate": theirs["gates"][k : k + 1]} if "gates" in theirs else {}
    return {**router(theirs, k), **gate}


def denseformer(theirs: Parameters, k: int) -> Parameters:
    return {"weight": theirs[f"alphas.{k // 2}"]} if k % 2 == 1 else {}


def mudd(theirs: Parameters, k: int) -> Parameters:
    if k % 2 == 0:
        return {}
    layer = k // 2
    return {
        "weight": theirs[f"static.{layer}"].squeeze(0),
        "w1": theirs[f"w1.{layer}.weight"],
        "w2": theirs[f"w2.{layer}.weight"],
    }


def of_site(theirs: Parameters, k: int) -> Parameters:
    """The parameters of hyper-connections before sublayer k."""
    prefix = f"sites.{k}."
    return {name.removeprefix(prefix): theirs[name] for name in theirs if name.startswith(prefix)}


def static_matrices(site: Parameters, reads: int) -> Parameters:
    """A_m, A_r and B; the first ``reads`` columns of alpha are A_m."""
    alpha = site["static_alpha"]
    return {"a_m": alpha[:, :reads], "a_r": alpha[:, reads:], "b": site["static_beta"]}


def gate_norm_and_scales(site: Parameters) -> Parameters:
    return {
        "gate_norm.weight": site["norm.weight"],
        "gate_norm.bias": site["norm.bias"],
        "s_a": site["alpha_scale"],
        "s_b": site["beta_scale"],
    }


def hyper(theirs: Parameters, k: int) -> Parameters:
    site = of_site(theirs, k)
    made = static_matrices(site, 1)
    if "dyn_alpha" in site:
        alpha = site["dyn_alpha"]
        made |= {"w_m": alpha[:, :1], "w_r": alpha[:, 1:], "w_b": site["dyn_beta"]}
        made |= gate_norm_and_scales(site)
    return made


def fractional(theirs: Parameters, k: int) -> Parameters:
    site = of_site(theirs, k)
    made = static_matrices(site, STREAMS)
    if "dyn_alpha" in site:
        made |= {"weight": torch.cat([site["dyn_alpha"], site["dyn_beta"].unsqueeze(1)], 1)}
        made |= gate_norm_and_scales(site)
    return made


def mhc(theirs: Parameters, k: int) -> Parameters:
    """The logits of its matrix are those of R^T."""
    site, n = of_site(theirs, k), STREAMS
    sizes = [n, n, n * n]
    phi = dict(zip(("pre", "post", "res"), site["phi"].split(sizes)))
    bias = dict(zip(("pre", "post", "res"), site["bias"].split(sizes)))
    phi["res"] = phi["res"].unflatten(0, (n, n)).transpose(0, 1).flatten(0, 1)
    bias["res"] = bias["res"].unflatten(0, (n, n)).T
    made = {}
    for part, alpha in zip(phi, site["alpha"]):
        made |= {f"phi_{part}": phi[part].T, f"b_{part}": bias[part], f"alpha_{part}": alpha}
    return made


def laurel(theirs: Parameters, k: int) -> Parameters:
    a, b = 2 * theirs["rw"][k].softmax(0)
    low, high = theirs["A"][k].T, b * theirs["B"][k].T
    return {"branch_weight": a, "skip_weight": b, "low": low, "high": high}


def unchanged(skips: list[SkipConnection], theirs: Parameters) -> None:
    """Leave our skip connections as they are."""


def with_first_eps(skips: list[SkipConnection], theirs: Parameters) -> None:
    """Let the first norm have the eps of the norm of x + g x."""
    g = theirs["gates"][0].item() if "gates" in theirs else 1.0
    assert g > -1
    skips[0].pre.eps = EPS / (1 + g) ** 2


def with_gate_eps(skips: list[SkipConnection], theirs: Parameters) -> None:
    for skip in skips:
        skip.gate_norm.eps = 1e-5


def with_read_eps(skips: list[SkipConnection], theirs: Parameters) -> None:
    """Add 1e-6 to p of mHC."""

    def add(gates: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable:
        def added(pre: Tensor, post: Tensor) -> tuple[Tensor, Tensor]:
            p, w = gates(pre, post)
            return p + 1e-6, w

        return added

    for skip in skips:
        skip.gates = add(skip.gates)


def with_rms_norm(skips: list[SkipConnection], theirs: Parameters) -> None:
    """Have its norm before the branch, where the rule itself has none."""
    for skip in skips:
        skip.pre = create_norm("rms", DIM, eps=EPS).double()


class Wiring(NamedTuple):
    """Our rule with its options, the parameters of its block k made of theirs, and what to set."""

    kind: str
    options: dict[str, Any]
    parameters: Callable[[Parameters, int], Parameters]
    adjust: Callable[[list[SkipConnection], Parameters], None] = unchanged
    tolerance: float = 1e-10


WIRINGS = {
    "prenorm": Wiring("preln", {}, no_parameters),
    "postnorm": Wiring("xskip", {"skip_lambda": 1.0}, post_norm),
    "attnres": Wiring("attnres", {}, next_router),
    "attnres-blocks": Wiring("attnres", {"block_size": 2}, next_router),
    "attnres-partial-block": Wiring("attnres", {"block_size": 4}, next_router),
    "mhar": Wiring("mhar", {"heads": 4}, next_router),
    "mhar-blocks": Wiring("mhar", {"heads": 4, "block_size": 2}, next_router),
    "dar": Wiring("delta_attnres", {}, delta, with_first_eps),
    "dar-gate": Wiring("delta_attnres", {"depth_gate": "zero"}, delta, with_first_eps),
    "denseformer": Wiring("denseformer", {}, denseformer),
    "muddformer": Wiring("mudd", {}, mudd),
    "hc": Wiring("hyper", {"streams": STREAMS}, hyper, with_gate_eps),
    "hc-static": Wiring("hyper", {"streams": STREAMS, "mixing": "static"}, hyper),
    "frac": Wiring("fractional", {"parts": STREAMS}, fractional, with_gate_eps),
    "frac-static": Wiring("fractional", {"parts": STREAMS, "mixing": "static"}, fractional),
    "mhc": Wiring("mhc", {"streams": STREAMS}, mhc, with_read_eps, tolerance=1e-4),
    "mhc-sinkhorn-without-eps": Wiring("mhc", {"streams": STREAMS}, mhc, with_read_eps),
    "laurel": Wiring("laurel", {"norm": "none", "rank": 2}, laurel, with_rms_norm),
}


def our_skips(wiring: Wiring, theirs: Parameters) -> list[SkipConnection]:
    """The skip connections of our stack, each of its parameters made of theirs."""
    options = {"norm": "rms", "eps": EPS, **wiring.options}
    layers = skip_stack(wiring.kind, DIM, LAYERS, **options).double()
    skips = [skip for layer in layers for skip in layer.values()]
    wiring.adjust(skips, theirs)
    for k, skip in enumerate(skips):
        made = wiring.parameters(theirs, k)
        if skip.pre is not None:
            made["pre.weight"] = STORED["gains"][k]
        ours = dict(skip.named_parameters())
        assert made.keys() == ours.keys()
        for name, value in made.items():
            set_values(ours[name], value)
    return skips


def set_values(parameter: nn.Parameter, value: Tensor) -> None:
    """Set a parameter to values of its shape; dimensions of size 1 do not count."""
    assert parameter.squeeze().shape == value.squeeze().shape
    with torch.no_grad():
        parameter.copy_(value.reshape(parameter.shape))


def run(skips: list[SkipConnection], x: Tensor) -> Tensor:
    for skip, weight in zip(skips, STORED["weights"], strict=True):
        h, carried = skip.prepare(x)
        x = skip(x, torch.tanh(h @ weight), carried)
    return x


@pytest.mark.parametrize("name", WIRINGS)
def test_output_and_gradient_of_the_input_are_theirs(name):
    """The tolerance is 1e-4 for ``mhc``, whose 20 steps add 1e-6 to each sum: 4e-5 was measured."""
    wiring, theirs = WIRINGS[name], STORED["wirings"][name]
    skips = our_skips(wiring, theirs["parameters"])
    x = STORED["input"].clone().requires_grad_()
    y = run(skips, x)
    if wiring.kind == "mhc":
        y = (0.5 + 1e-6) * y
    (gradient,) = torch.autograd.grad(y, x, STORED["upstream"])
    tolerance = {"rtol": wiring.tolerance, "atol": wiring.tolerance}
    torch.testing.assert_close(y, theirs["output"], **tolerance)
    torch.testing.assert_close(gradient, theirs["input_gradient"], **tolerance)


def test_every_stored_wiring_is_compared():
    assert WIRINGS.keys() == STORED["wirings"].keys()
