"""Agreement with code that nobody here wrote.

The same weights go in, the same outputs and gradients come out, in float64. ``make test-peers``
installs the packages of requirements.txt in a folder on PYTHONPATH; a test whose package is missing
is skipped. Tolerance: 1e-10, relative and absolute, except where a test says otherwise. Where a
peer differs from its paper the test says so. Not compared: the AttentionResidual of x-transformers,
whose query is computed from the newest state, where that of our ``attnres`` is a parameter.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peer_packages import copy, draw, peer, randomised
from torch import Tensor, nn

from fairseq_rskip.norms import create_norm
from fairseq_rskip.residual import Place, SkipConnection, create_skip

D = 6
ENCODER = Place("encoder", "ffn", 5, 6, 6, 1, 2, 3)
pytestmark = pytest.mark.usefixtures("stock_operators")


def check(
    ours: Callable, theirs: Callable, shared: list[tuple[Tensor, Tensor]], tolerance: float = 1e-10
) -> None:
    """Compare ``ours(x, f)`` with ``theirs(x, f)``.

    Outputs are compared, gradients of x and F, and of parameters (theirs, ours).
    """
    copy(shared)
    x, f, upstream = draw(3, 4, D), draw(3, 4, D, seed=1), draw(3, 4, D, seed=2).detach()
    actual = []
    for function, side in ((ours, 1), (theirs, 0)):
        y = function(x, f)
        weight = upstream.expand_as(y)
        parameters = [pair[side] for pair in shared]
        gradients = torch.autograd.grad(y, [x, f, *parameters], weight, allow_unused=True)
        actual.append([y, *(torch.zeros(1) if g is None else g.flatten() for g in gradients)])
    for mine, peers in zip(*actual):
        torch.testing.assert_close(
            mine, peers.to(mine.dtype).reshape(mine.shape), rtol=tolerance, atol=tolerance
        )


def applied(skip: SkipConnection) -> Callable[[Tensor, Tensor], Tensor]:
    """One block whose branch is ``tanh(h) * F``, so that what the branch sees matters."""

    def block(x: Tensor, f: Tensor) -> Tensor:
        h, carried = skip.prepare(x)
        return skip(x, torch.tanh(h) * f, carried)

    return block


@pytest.mark.parametrize("scale", [1.0, 2.0, 0.5])
def test_xskip_is_the_residual_of_x_transformers(scale):
    theirs = peer("x_transformers.x_transformers").Residual(D, scale_residual_constant=scale)
    ours = create_skip("xskip", D, skip_lambda=scale, norm="none").double()
    check(ours, lambda x, f: theirs(f, x), [])


def test_wskip_is_the_scaled_residual_of_x_transformers():
    theirs = randomised(peer("x_transformers.x_transformers").Residual(D, scale_residual=True))
    ours = create_skip("wskip", D, norm="none").double()
    check(ours, lambda x, f: theirs(f, x), [(theirs.residual_scale, ours.weight)])


def test_the_orthogonal_update_is_that_of_x_transformers():
    """It projects over a whole example, which here is one position; no eps."""
    project = peer("x_transformers.x_transformers").orthog_project
    ours = create_skip("orthogonal", D, norm="none", eps=1e-30).double()
    check(ours, lambda x, f: x + project(f.flatten(0, 1), x.flatten(0, 1)).view_as(x), [])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("preln", {"pre_norm": True}),
        ("xskip", {"pre_norm": False}),
        ("periln", {"sandwich_norm": True}),
    ],
    ids=["pre-norm", "post-norm", "Peri-LN"],
)
def test_norm_places_are_those_of_x_transformers(kind, options):
    """Its norms have no bias. Its Peri-LN is its sandwich_norm."""
    options = {
        "custom_layers": ("f", "f"),
        "norm_add_unit_offset": False,
        "verbose": False,
        **options,
    }
    encoder = randomised(peer("x_transformers").Encoder(dim=D, depth=1, heads=1, **options))
    layers = list(encoder.layers)
    places = [Place("encoder", "ffn", k, 2) for k in range(2)]
    skips = [
        create_skip(kind, D, place=p, **({"skip_lambda": 1.0} if kind == "xskip" else {}))
        for p in places
    ]
    shared = []
    for (norms, _, _), skip in zip(layers, skips):
        skip.double()
        ours = [skip.pre, skip.branch, next(iter(skip.post), None)]
        shared += [
            (theirs.gamma, mine.weight) for theirs, mine in zip(norms, ours) if mine is not None
        ]
    final = create_norm("layer", D).double()
    if hasattr(encoder.final_norm, "gamma"):
        shared.append((encoder.final_norm.gamma, final.weight))

    def ours(x: Tensor, _f: Tensor) -> Tensor:
        for (_, branch, _), skip in zip(layers, skips):
            h, _ = skip.prepare(x)
            x = skip(x, branch(h))
        return final(x) if hasattr(encoder.final_norm, "gamma") else x

    check(ours, lambda x, _f: encoder(x), shared)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
def test_layers_are_those_of_torch(norm_first):
    theirs = randomised(
        nn.TransformerEncoderLayer(D, 2, 8, 0.0, norm_first=norm_first, batch_first=True)
    )
    kind = {"kind": "preln"} if norm_first else {"kind": "xskip", "skip_lambda": 1.0}
    skips = [create_skip(dim=D, **kind).double() for _ in range(2)]
    norms = [skip.pre if norm_first else skip.post[0] for skip in skips]
    pairs = zip((theirs.norm1, theirs.norm2), norms)
    shared = [(getattr(a, n), getattr(b, n)) for a, b in pairs for n in ("weight", "bias")]
    attention = lambda h: theirs.self_attn(h, h, h, need_weights=False)[0]  # noqa: E731
    branches = (attention, lambda h: theirs.linear2(theirs.linear1(h).relu()))

    def ours(x: Tensor, _f: Tensor) -> Tensor:
        for skip, branch in zip(skips, branches):
            x = skip(x, branch(skip.prepare(x)[0]))
        return x

    check(ours, lambda x, _f: theirs(x), shared)


NORMS = {
    "scale": ("ScaleNorm", [("g", "weight", D**0.5)]),
    "rms": ("RMSNorm", [("g", "weight", 1.0)]),
    "dyt": (
        "DynamicTanh",
        [("pre_tanh_scale", "alpha", 1.0), ("gamma", "weight", 1.0), ("beta", "bias", 1.0)],
    ),
}


@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_those_of_x_transformers(norm):
    """Its g is a factor of sqrt(dim), and its RMSNorm has no eps: ours has 1e-20 here."""
    name, parts = NORMS[norm]
    theirs = randomised(getattr(peer("x_transformers.x_transformers"), name)(D))
    skip = create_skip("preln", D, norm=norm, eps=1e-20).double()
    copy([(factor * getattr(theirs, a), getattr(skip.pre, b)) for a, b, factor in parts])
    check(applied(skip), lambda x, f: x + torch.tanh(theirs(x)) * f, [])


@pytest.mark.parametrize(
    ("package", "inside"),
    [("timm.layers", ()), ("x_transformers.x_transformers", (nn.Identity(),))],
)
def test_layerscale(package, inside):
    """The branch of x-transformers is inside its module, timm's outside."""
    theirs, ours = (
        randomised(peer(package).LayerScale(*inside, D)),
        create_skip("layerscale", D, norm="none", init=1.0),
    )
    check(ours.double(), lambda x, f: x + theirs(f), [(theirs.gamma, ours.weight)])


def test_skipinit_is_that_of_timms_normalizer_free_nets():
    theirs = peer("timm.models.nfnet").NormFreeBlock(
        D, D, stride=1, alpha=1.0, beta=1.0, skipinit=True, act_layer=nn.SiLU
    )
    assert float(theirs.skipinit_gain) == 0.0 == float(create_skip("skipinit", D).weight)
    theirs = randomised(theirs).eval()
    ours = create_skip("skipinit", D, channel_dim=1).double()
    copy([(theirs.skipinit_gain, ours.weight)])
    x = draw(2, D, 3, 3)
    gain = theirs.skipinit_gain
    with torch.no_grad():
        branch = (theirs(x) - x) / gain
        torch.testing.assert_close(ours(x, branch), theirs(x), rtol=1e-10, atol=1e-10)


def test_residual_scaling_is_that_of_timms_inception_resnet():
    """Its block with scale 0.1 and no activation: the paper's "0.1 to 0.3"."""
    theirs = randomised(
        peer("timm.models.inception_resnet_v2").Block8(scale=0.1, no_relu=True)
    ).eval()
    plain = type(theirs)(scale=1.0, no_relu=True).double().eval()
    plain.load_state_dict(theirs.state_dict())
    ours = create_skip("residual_scaling", 2080, channel_dim=1).double()
    with torch.no_grad():
        x = draw(1, 2080, 3, 3) / 100
        branch = plain(x) - x
        scale = branch.abs().max()
        torch.testing.assert_close(ours(x, branch) / scale, theirs(x) / scale, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("blocks", [12, 18])
def test_admin_is_that_of_its_authors(blocks):
    """The forward pass and the profile-free start are compared.

    Their calculate_init is the square root of what its formula says.
    """
    admin = peer("admin_torch.admin")
    theirs = randomised(admin.OmegaResidual(1.0, as_parameter=True, embed_dim=D))
    ours = create_skip("admin", D).double()
    norm = nn.LayerNorm(D).double()
    check(ours, lambda x, f: norm(theirs(x, f)), [(theirs.omega, ours.weight)])
    place = Place("encoder", "ffn", 0, blocks // 2, position=0, sublayers=2)
    start = create_skip("admin", D, omega="formula", place=place).constants()["weight"]
    assert start == pytest.approx(admin.calculate_init(blocks), rel=1e-6)


def test_deepnorm_is_that_of_torchscale_except_for_the_encoders_beta():
    """torchscale divides the encoder's weights by (N^4 M)^(1/16) / 1.15.

    The paper multiplies by 0.87 (N^4 M)^(-1/16): we follow the paper. alpha is the same.
    """
    config = peer("torchscale.architecture.config").EncoderDecoderConfig(
        deepnorm=True,
        encoder_layers=6,
        decoder_layers=6,
        encoder_embed_dim=D,
        encoder_attention_heads=2,
        vocab_size=8,
    )
    layer = peer("torchscale.architecture.encoder").EncoderLayer(config, 0, is_encoder_decoder=True)
    ours = create_skip("deepnorm", D, place=ENCODER).double()
    norm = nn.LayerNorm(D).double()
    check(ours, lambda x, f: norm(layer.residual_connection(f, x)), [], tolerance=1e-9)
    decoder = peer("torchscale.architecture.decoder").DecoderLayer(
        config, 0, is_encoder_decoder=True
    )
    place = Place("decoder", "ffn", 5, 6, 6, 2, 3, 2)
    assert create_skip("deepnorm", D, place=place).skip_scale == pytest.approx(decoder.alpha)
    assert pytest.approx(ours.beta * 1.15 / 0.87) == 1.15 * (6**4 * 6) ** (-1 / 16)


@pytest.mark.parametrize("kind", ["highway", "exclusive_gate"])
def test_gates_are_the_gated_residual_of_lucidrains(kind):
    """Its gate sees x and F, and is that of x: with no weight on F it is 1 - T."""
    theirs = randomised(peer("hyper_connections.residuals").GatedResidual(D, fine_gate=True))
    ours = create_skip(kind, D, norm="none").double()
    with torch.no_grad():
        theirs.to_learned_mix.weight[:, :D] = 0
    copy(
        [
            (-theirs.to_learned_mix.weight[:, D:], ours.gate_weight),
            (-theirs.to_learned_mix.bias, ours.gate_bias),
        ]
    )
    check(ours, lambda x, f: theirs(f, x), [])


def streamed(skip: SkipConnection, theirs: Callable[[Tensor], Any], n: int) -> None:
    """Compare one block in the middle of a stack with ``theirs(streams)``.

    What the branch reads is compared, and how its output is added. Streams are rows of the batch
    there.
    """
    h, f, upstream = draw(4, 2, n * D), draw(4, 2, D, seed=1), draw(4, 2, n * D, seed=2).detach()

    def ours() -> Tensor:
        current, carried = skip.prepare(h)
        return skip(h, torch.tanh(current) * f, carried)

    def peers() -> Tensor:
        streams = h.unflatten(-1, (n, D)).movedim(2, 1).flatten(0, 1)  # (b s) ... d
        current, add = theirs(streams)
        return add(torch.tanh(current) * f).unflatten(0, (4, n)).movedim(1, 2).flatten(2)

    actual = [[y, *torch.autograd.grad(y, [h, f], upstream)] for y in (ours(), peers())]
    for mine, their in zip(*actual):
        torch.testing.assert_close(mine, their, rtol=1e-10, atol=1e-10)


def hyper(
    kind: str, theirs: nn.Module, options: dict[str, Any], pairs: list[tuple[str, str]]
) -> None:
    """One block in the middle of a stack: H of three streams in, H' out."""
    n = 3
    skip = create_skip(
        kind, D, streams=n, norm="none", place=Place(index=1, depth=3), **options
    ).double()
    copied = [(getattr(theirs, a), getattr(skip, b)) for a, b in pairs]
    alpha = theirs.static_alpha.detach()
    copied += [(alpha[:, 0], skip.a_m if kind == "hyper" else skip.b_pre)]
    copied += [
        (
            alpha[:, 1:] if kind == "hyper" else alpha[:, 1:].T,
            skip.a_r if kind == "hyper" else skip.b_res,
        )
    ]
    copy(copied)
    streamed(skip, theirs, n)


@pytest.mark.parametrize("mixing", ["static", "dynamic"])
def test_hyper_connections_are_those_of_lucidrains(mixing):
    """Its norm is an RMSNorm where the paper has a layer norm.

    A layer norm takes its place here; one dynamic scale is A's.
    """
    theirs = randomised(
        peer("hyper_connections.hyper_connections").HyperConnections(3, dim=D, layer_index=1)
    )
    theirs.norm = nn.LayerNorm(D).double()
    pairs = [("static_beta", "b")]
    if mixing == "static":
        with torch.no_grad():
            theirs.dynamic_alpha_scale.zero_(), theirs.dynamic_beta_scale.zero_()
    else:
        theirs.w_m = theirs.dynamic_alpha_fn[:, :1]
        theirs.w_r = theirs.dynamic_alpha_fn[:, 1:]
        pairs += [("w_m", "w_m"), ("w_r", "w_r"), ("dynamic_beta_fn", "w_b")]
        pairs += [("dynamic_alpha_scale", "s_a"), ("dynamic_beta_scale", "s_b")]
    hyper("hyper", theirs, {"mixing": mixing}, pairs)


def test_mhc_without_its_dynamic_part_is_that_of_lucidrains(float64_casts):
    """Its projections see one stream at a time, the paper's all of them: they are left at 0.

    Its conversions to fp32 are to float64 here. Sinkhorn's 20 steps are in another order, which
    changes less than 1e-12 after them.
    """
    module = peer("hyper_connections.manifold_constrained_hyper_connections")
    theirs = module.ManifoldConstrainedHyperConnections(3, dim=D, layer_index=1).double()
    with torch.no_grad():
        (
            theirs.static_alpha.copy_(draw(*theirs.static_alpha.shape)),
            theirs.static_beta.copy_(draw(3, seed=1)),
        )
    hyper("mhc", theirs, {}, [("static_beta", "b_post")])


def prepared(theirs: nn.Module) -> Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """A residual of x-transformers, as :func:`streamed` takes one."""

    def block(streams: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        read, residuals, more = theirs.prepare(streams)
        return read, lambda f_x: theirs(f_x, residuals, **more)

    return block


def test_hyper_connections_of_x_transformers_mix_by_a_matrix_of_ones():
    """Its HyperConnection is mHC by name, with projections that see one stream at a time.

    They are left at 0. Version 2.31.10 normalises each stream's weights as a matrix of one row:
    its R is all ones, for any parameters. It is our ``hyper`` with A_r = 1 and mHC's gates.
    """
    theirs = (
        peer("x_transformers.x_transformers")
        .HyperConnection(D, layer_index=1, num_residual_streams=3)
        .double()
    )
    place = Place(index=1, depth=3)
    skip = create_skip("hyper", D, streams=3, mixing="static", norm="none", place=place).double()
    with torch.no_grad():
        theirs.dynamic_beta_scale.zero_()
        theirs.static_alpha.copy_(draw(*theirs.static_alpha.shape))
        theirs.static_beta.copy_(draw(3, seed=1))
    copy(
        [
            (theirs.static_alpha[:, 0].sigmoid(), skip.a_m),
            (torch.ones(3, 3), skip.a_r),
            (2 * theirs.static_beta.sigmoid(), skip.b),
        ]
    )
    streamed(skip, prepared(theirs), 3)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("x_transformers.x_transformers", "GRUGating"),
        ("hyper_connections.residuals", "GRUGatedResidual"),
    ],
    ids=["x-transformers", "hyper-connections"],
)
def test_the_gru_gate_is_that_of_lucidrains(module, name):
    """torch's GRUCell with input F and state x; its biases start at random."""
    theirs = randomised(getattr(peer(module), name)(D))
    ours = create_skip("gru_gate", D).double()
    pairs = [
        (theirs.gru.weight_ih, ours.branch_weight),
        (theirs.gru.weight_hh, ours.stream_weight),
        (theirs.gru.bias_ih, ours.branch_bias),
        (theirs.gru.bias_hh, ours.stream_bias),
    ]
    check(ours, lambda x, f: theirs(f, x), pairs)


def test_identity_hyper_connections_are_lucidrains_mhc_with_the_identity(float64_casts):
    """Its projections see one stream at a time, the paper's all of them: they are left at 0.

    Its conversions to fp32 are to float64 here.
    """
    module = peer("hyper_connections.manifold_constrained_hyper_connections")
    options = {"dim": D, "layer_index": 1, "residual_mix_constraint_fn": identity_like}
    theirs = module.ManifoldConstrainedHyperConnections(3, **options).double()
    skip = create_skip("ihc", D, streams=3, norm="none", place=Place(index=1, depth=3)).double()
    with torch.no_grad():
        theirs.static_alpha.copy_(draw(*theirs.static_alpha.shape))
        theirs.static_beta.copy_(draw(3, seed=1).view_as(theirs.static_beta))
    copy([(theirs.static_alpha[:, 0], skip.b_pre), (theirs.static_beta, skip.b_post)])
    streamed(skip, theirs, 3)


def identity_like(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.size(-1), dtype=matrix.dtype).expand_as(matrix)


def test_the_read_gate_of_a_gated_residual_is_that_of_x_transformers():
    """Its write gate shares the bottleneck, which Hugging Face's model does not have.

    Both are left at 0, as are the biases of its gates. It has no eps of its own.
    """
    module = peer("x_transformers.x_transformers")
    theirs = module.GatedMultiResidual(
        D, layer_index=1, num_residual_streams=3, read_gate_rank=2
    ).double()
    place = Place(index=1, depth=3)
    eps = torch.finfo(torch.float64).eps
    skip = create_skip("gated_residual", D, streams=3, gate_rank=2, eps=eps, place=place).double()
    with torch.no_grad():
        for parameter in (theirs.static_read_logit, theirs.static_write_logit):
            parameter.zero_()
        theirs.to_write_gate.weight.zero_()
        skip.write.zero_()
        theirs.dynamic_gate_scale.fill_(1.0)
        for k, parameter in enumerate(
            (theirs.read_gain, theirs.to_bottleneck.weight, theirs.to_read_gate.weight)
        ):
            parameter.copy_(draw(*parameter.shape, seed=k))
    copy(
        [
            (theirs.read_gain, skip.gain),
            (theirs.to_bottleneck.weight, skip.gate_down),
            (theirs.to_read_gate.weight, skip.gate_up),
        ]
    )
    streamed(skip, prepared(theirs), 3)


@pytest.mark.parametrize(("norm", "name"), [("layer", "LigerLayerNorm"), ("rms", "LigerRMSNorm")])
def test_norms_are_those_of_liger_kernel(norm, name):
    """In fp32: its kernels are Triton's and need a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("liger-kernel computes on a GPU only")
    theirs = getattr(peer("liger_kernel.transformers"), name)(256, eps=1e-5).cuda()
    ours = create_norm(norm, 256).cuda()
    x = torch.randn(64, 256, device="cuda")
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
