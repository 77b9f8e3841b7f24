"""Rules of several streams against the decoder layers of Hugging Face's transformers.

A layer is built from a small configuration, with its own hyper-connections and its own sums. Its
two sublayers are replaced by ``tanh(h) * F`` and its norms by the identity. Ours are the two blocks
of the middle layer of three: a stack's ends differ, as the rules' docstrings say. Tolerance: 1e-10,
relative and absolute, except where a test says otherwise. The models convert to fp32; here these
conversions are to float64.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peer_packages import copy, draw, peer
from torch import Tensor, nn

from fairseq_rskip.residual import Place, SkipConnection, create_skip

D = 6
N = 3
EPS = 1e-6
TOKENS = {"vocab_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
pytestmark = pytest.mark.usefixtures("stock_operators", "float64_casts")

# the parameters that a rule's tensors make, by name; ``part`` gives a tensor of the rule by name
Layout = Callable[[Callable[[str], Tensor]], dict[str, Tensor]]


class Sublayer(nn.Module):
    """Return ``tanh(h) * F``, followed by ``others`` times None if the model's has more results."""

    def __init__(self, f: Tensor, others: int = 0):
        super().__init__()
        self.f, self.others = f, others

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        y = torch.tanh(hidden_states) * self.f
        return (y, *[None] * self.others) if self.others else y


def decoder_layer(model: str, prefix: str, **options: Any) -> nn.Module:
    """A decoder layer of ``transformers.models.<model>``, without norms, in float64."""
    folder = f"transformers.models.{model}"
    configuration = getattr(peer(f"{folder}.configuration_{model}"), f"{prefix}Config")
    config = configuration(
        hidden_size=D,
        num_hidden_layers=1,
        num_attention_heads=2,
        rms_norm_eps=EPS,
        **TOKENS,
        **options,
    )
    layer = getattr(peer(f"{folder}.modeling_{model}"), f"{prefix}DecoderLayer")(config, 0)
    for name in ("input_layernorm", "post_attention_layernorm"):
        if hasattr(layer, name):
            setattr(layer, name, nn.Identity())
    return layer.double()


def drawn_skips(kind: str, **options: Any) -> list[SkipConnection]:
    """The two blocks of a layer, every parameter drawn."""
    skips = []
    for position in range(2):
        place = Place(index=1, depth=3, position=position, sublayers=2)
        skip = create_skip(
            kind, D, streams=N, norm="none", eps=EPS, place=place, **options
        ).double()
        copy(
            [
                (0.5 * draw(*parameter.shape, seed=10 * position + k), parameter)
                for k, parameter in enumerate(skip.parameters())
            ]
        )
        skips.append(skip)
    return skips


def check_layer(
    theirs: Callable[[Tensor, list[Tensor]], Tensor],
    modules: list[nn.Module],
    skips: list[SkipConnection],
    layout: Layout,
    tolerance: float = 1e-10,
) -> None:
    """Compare outputs and the gradients of H, F and all parameters.

    ``theirs(h, f)`` is the layer's output for streams ``(..., n * dim)`` and its two F. ``modules``
    have the parameters that ``layout`` makes of each skip's.
    """
    h, upstream = draw(4, 2, N * D), draw(4, 2, N * D, seed=1).detach()
    f = [draw(4, 2, D, seed=2), draw(4, 2, D, seed=3)]

    x = h
    for skip, f_x in zip(skips, f):
        current, carried = skip.prepare(x)
        x = skip(x, torch.tanh(current) * f_x, carried)
    ours = [x, *torch.autograd.grad(x, [h, *f], upstream, retain_graph=True)]
    for skip in skips:
        named = dict(skip.named_parameters())
        gradients = torch.autograd.grad(x, list(named.values()), upstream, retain_graph=True)
        ours += layout(dict(zip(named, gradients)).__getitem__).values()

    y = theirs(h, f)
    their_parameters = [dict(module.named_parameters()) for module in modules]
    names = layout(dict(skips[0].named_parameters()).__getitem__).keys()
    inputs = [h, *f, *(parameters[name] for parameters in their_parameters for name in names)]
    for mine, their in zip(ours, [y, *torch.autograd.grad(y, inputs, upstream)], strict=True):
        torch.testing.assert_close(mine, their, rtol=tolerance, atol=tolerance)
    for parameters in their_parameters:
        assert parameters.keys() == names


def share(modules: list[nn.Module], skips: list[SkipConnection], layout: Layout) -> None:
    """Each module's parameters become those of its skip."""
    for module, skip in zip(modules, skips):
        parameters = dict(module.named_parameters())
        made = layout(dict(skip.named_parameters()).__getitem__)
        copy([(value, parameters[name]) for name, value in made.items()])


def gated_layout(part: Callable[[str], Tensor]) -> dict[str, Tensor]:
    return {
        "hc_norm.weight": part("gain").flatten(),
        "input_mix_weight_down.weight": part("gate_down"),
        "input_mix_weight_up.weight": part("gate_up"),
        "block_inject_weight.weight": part("write"),
    }


def test_gated_residuals_are_those_of_qwen4_exp():
    """Its gain is 1 + a weight."""
    layer = decoder_layer(
        "qwen4_exp",
        "Qwen4ExpText",
        hc_count=N,
        hc_lowrank=2,
        layer_types=["linear_attention"],
        num_key_value_heads=1,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=4,
        shared_expert_intermediate_size=4,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
    )
    modules = [layer.attn_hyper_connection, layer.mlp_hyper_connection]
    skips = drawn_skips("gated_residual", gate_rank=2)
    share(modules, skips, gated_layout)
    with torch.no_grad():
        for module in modules:
            module.hc_norm.weight.sub_(1.0)

    def theirs(h: Tensor, f: list[Tensor]) -> Tensor:
        layer.linear_attn, layer.mlp = Sublayer(f[0]), Sublayer(f[1])
        return layer(h, position_embeddings=None)

    check_layer(theirs, modules, skips, gated_layout)


def identity_layout(part: Callable[[str], Tensor]) -> dict[str, Tensor]:
    return {
        "fn": torch.cat([part("phi_pre"), part("phi_post")], 1).T,
        "base": torch.cat([part("b_pre"), part("b_post")]),
        "scale": torch.cat([part("alpha_pre"), part("alpha_post")]),
    }


@pytest.mark.parametrize(("hc_eps", "tolerance"), [(0.0, 1e-10), (1e-6, 1e-4)], ids=["0", "1e-6"])
def test_identity_hyper_connections_are_those_of_hy_v4(hc_eps, tolerance):
    """It adds hc_eps, by default 1e-6, to p and w; without it both are the same function.

    1e-4 with it: gradients of the parameters are sums over positions.
    """
    layer = decoder_layer(
        "hy_v4",
        "HYV4",
        hc_mult=N,
        hc_eps=hc_eps,
        intermediate_size=4,
        q_lora_rank=2,
        kv_lora_rank=2,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        index_n_heads=1,
        index_head_dim=8,
    )
    modules = [layer.attn_hc, layer.ffn_hc]
    skips = drawn_skips("ihc")
    share(modules, skips, identity_layout)

    def theirs(h: Tensor, f: list[Tensor]) -> Tensor:
        layer.self_attn, layer.mlp = Sublayer(f[0], others=2), Sublayer(f[1])
        return layer(h.unflatten(-1, (N, D)))[0].flatten(-2)

    check_layer(theirs, modules, skips, identity_layout, tolerance)


def constrained_layout(part: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """The weights of what a stream gives are a row of its matrix, a column of ours."""
    of_matrix = part("phi_res").unflatten(-1, (N, N)).mT.flatten(-2)
    return {
        "fn": torch.cat([part("phi_pre"), part("phi_post"), of_matrix], 1).T,
        "base": torch.cat([part("b_pre"), part("b_post"), part("b_res").T.flatten()]),
        "scale": torch.cat([part("alpha_pre"), part("alpha_post"), part("alpha_res")]),
    }


@pytest.mark.parametrize(("hc_eps", "tolerance"), [(0.0, 1e-10), (1e-6, 1e-4)], ids=["0", "1e-6"])
def test_mhc_is_that_of_deepseek_v4(hc_eps, tolerance):
    """Sinkhorn's 20 steps are in the same order: its matrix, whose rows come first, is R^T.

    It adds hc_eps, by default 1e-6, to p, to the first step's softmax and to the sums that divide;
    without it both are the same function. 1e-4 with it: gradients of the parameters are sums over
    positions.
    """
    layer = decoder_layer(
        "deepseek_v4",
        "DeepseekV4",
        hc_mult=N,
        hc_eps=hc_eps,
        mlp_layer_types=["moe"],
        head_dim=16,
        q_lora_rank=2,
        o_groups=1,
        o_lora_rank=2,
        index_n_heads=1,
        index_head_dim=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=4,
    )
    modules = [layer.attn_hc, layer.ffn_hc]
    skips = drawn_skips("mhc")
    share(modules, skips, constrained_layout)

    def theirs(h: Tensor, f: list[Tensor]) -> Tensor:
        layer.self_attn, layer.mlp = Sublayer(f[0], others=1), Sublayer(f[1])
        return layer(h.unflatten(-1, (N, D))).flatten(-2)

    check_layer(theirs, modules, skips, constrained_layout, tolerance)
