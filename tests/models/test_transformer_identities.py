"""What a skip Transformer must equal.

That is stock fairseq at λ = 1, itself by another path, and the paper's counts.
"""

from types import SimpleNamespace

import pytest
import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from fairseq.sequence_generator import SequenceGenerator
from transformer_helpers import ALL_TINY, TINY, batch, build, dictionary, randomise, sentences

from fairseq_rskip.errors import UserError
from fairseq_rskip.models.flat_config import resolve
from fairseq_rskip.modules.transformer import SkipTransformerEncoderLayer
from fairseq_rskip.residual import KINDS, skips

OPTIONS = [
    {},
    {"cross_self_attention": True},
    {"cross_self_attention": True, "no_cross_attention": True},
    {"layernorm_embedding": True},
    {"share_decoder_input_output_embed": True},
    {"decoder_embed_dim": 16},
    {"share_all_embeddings": True},
]
PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}


def logits(model, src, lengths, prev):
    with torch.no_grad():
        return model(src, lengths, prev)[0]


def hypotheses(model, pairs):
    src, lengths, prev = batch(pairs)
    sample = {"net_input": {"src_tokens": src, "src_lengths": lengths, "prev_output_tokens": prev}}
    generator = SequenceGenerator([model], dictionary(), beam_size=4, max_len_b=12)
    actual = generator.generate([model], sample)
    return [
        [(h["tokens"].tolist(), round(float(h["score"]), 4)) for h in beams] for beams in actual
    ]


# architecture, its options, stock's, those of both
CASES = [
    ("xskip_ln", {"skip_lambda": 1}, {}, {}),
    ("xskip", {"skip_lambda": 1, **PRE_NORM}, PRE_NORM, {}),
]
CASES += [("rskip_ln", {"skip_lambda": 1}, {}, options) for options in OPTIONS]
CASES += [("preln", {}, PRE_NORM, options) for options in ({}, {"cross_self_attention": True})]
CASES += [("preln", {}, PRE_NORM, {"no_decoder_final_norm": True})]


@pytest.mark.parametrize(
    ("arch", "ours", "stocks", "options"), CASES, ids=[f"{c[0]}-{' '.join(c[3])}" for c in CASES]
)
def test_a_stock_checkpoint_loads_and_says_the_same(arch, ours, stocks, options, stock_operators):
    stock = build("transformer_tiny", **TINY, **stocks, **options)
    randomise(stock)
    model = build(f"transformer_{arch}_tiny", seed=2, **TINY, **ours, **options)
    model.load_state_dict(stock.state_dict(), strict=True)
    inputs = batch(sentences())
    with torch.no_grad():
        (actual, found_extra), (expected, expected_extra) = (
            each(*inputs) for each in (model, stock)
        )
    assert torch.equal(actual, expected)
    attention = [extra["attn"][0] for extra in (found_extra, expected_extra)]
    assert (attention[0] is None) == (attention[1] is None) == ("no_cross_attention" in options)
    assert attention[0] is None or torch.equal(*attention)
    assert hypotheses(model, sentences()) == hypotheses(stock, sentences())


# what docs/training.md says of a checkpoint of stock fairseq; rskip and xskip have λ = 1
TAKE_POST_NORM = {"xskip", "rskip", "askip", "deepnorm", "b2t"}
TAKE_PRE_NORM = {"preln", "lnscale", "completep", "gpt2", "orthogonal", "mixln"}


@pytest.mark.parametrize(("pre_norm", "taken"), [(False, TAKE_POST_NORM), (True, TAKE_PRE_NORM)])
def test_exactly_the_rules_of_the_page_take_a_checkpoint_of_stock(pre_norm, taken):
    """docs/training.md names them; the others refuse it by the names that they miss."""
    sides = ("encoder", "decoder")
    norms = {f"{side}_normalize_before": pre_norm for side in sides}
    state = build("transformer_tiny", **TINY, **norms).state_dict()
    takers = set()
    for kind in KINDS:
        one = {"skip_lambda": 1} if kind in ("xskip", "rskip") else {}
        model = build("transformer_skip_tiny", **TINY, skip_kind=kind, **one)
        try:
            model.load_state_dict(dict(state), strict=True)
        except RuntimeError:
            continue
        takers.add(kind)
    assert takers == taken


def test_an_encoder_layer_equals_stocks_under_a_mask_and_returns_fc(stock_operators):
    config = resolve(
        SimpleNamespace(
            **vars(MODEL_DATACLASS_REGISTRY["transformer_rskip_ln_tiny"](skip_lambda=1.0))
        )
    )
    torch.manual_seed(1)
    stock = TransformerEncoderLayerBase(config, return_fc=True)
    ours = SkipTransformerEncoderLayer(config, return_fc=True)
    randomise(stock)
    state = {f"layer.{key}": value for key, value in stock.state_dict().items()}
    ours.upgrade_state_dict_named(state, "layer")
    ours.load_state_dict({key[len("layer.") :]: value for key, value in state.items()}, strict=True)
    assert ours.can_use_fastpath is False, "fairseq's fused path knows no skip of ours"
    x, padding = (
        torch.randn(5, 3, 64),
        torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]).bool(),
    )
    future = torch.ones(5, 5).triu(1)
    expected = stock.eval()(x, padding, attn_mask=future)
    for actual, wanted in zip(ours.eval()(x, padding, attn_mask=future), expected):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)
    unmasked = ours(x, padding)[0]
    assert (unmasked - expected[0]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("saved", "built", "says"),
    [
        (
            "transformer_tiny",
            "transformer_rskip_ln_tiny",
            "1 normalisations in the checkpoint and 2 in the model",
        ),
        ("transformer_kromhc_tiny", "transformer_hyper_tiny", "kind='mhc': expected 'hyper'"),
    ],
)
def test_a_checkpoint_of_another_rule_is_refused_with_both(saved, built, says):
    with pytest.raises(UserError, match=says):
        build(built, **TINY).load_state_dict(build(saved, **TINY).state_dict())


@pytest.mark.parametrize(
    "arch,options,other,other_options",
    [
        ("mixln", {"skip_post_share": 0}, "preln", {}),
        ("mixln", {"skip_post_share": 1}, "xskip_ln", {"skip_lambda": 1}),
        (
            "lnscale",
            {"encoder_layers": 1, "decoder_layers": 1},
            "preln",
            {"encoder_layers": 1, "decoder_layers": 1},
        ),
        ("preln", {"skip_norm": "rms"}, "rmsnorm", {}),
    ],
    ids=["mixln-0", "mixln-1", "lnscale-1-layer", "rmsnorm"],
)
def test_one_rule_is_another_in_its_limit(arch, options, other, other_options):
    """The same state under the same names, the same numbers."""
    expected = build(f"transformer_{other}_tiny", **{**TINY, **other_options})
    randomise(expected)
    model = build(f"transformer_{arch}_tiny", seed=2, **{**TINY, **options})
    model.load_state_dict(dict(expected.state_dict()), strict=True)  # without the note of its rule
    inputs = batch(sentences())
    assert torch.equal(logits(model, *inputs), logits(expected, *inputs))


ENDS_IN_A_NORM = ["preln", "periln", "outln", "lnscale", "mixln", "rmsnorm", "dyt"]
ENDS_IN_A_NORM += ["nag", "gated_residual"]


@pytest.mark.parametrize("arch", ENDS_IN_A_NORM)
def test_an_unnormalised_stream_ends_in_the_norm_of_the_skips(arch):
    model = build(f"transformer_{arch}_tiny", **TINY)
    name = {"rmsnorm": "RMSNorm", "dyt": "DyT"}.get(arch, "LayerNorm")
    assert (
        type(model.encoder.layer_norm).__name__ == type(model.decoder.layer_norm).__name__ == name
    )
    assert build("transformer_mixln_tiny", **TINY, skip_post_share=1).encoder.layer_norm is None


@pytest.mark.parametrize(
    "options,stocks,arch,ours",
    [
        ({}, {}, "rskip_ln", {"skip_lambda": 1}),
        (
            {"cross_self_attention": True, "no_cross_attention": True},
            {},
            "rskip_ln",
            {"skip_lambda": 1},
        ),
        ({}, PRE_NORM, "preln", {}),
        ({"activation_dropout": 0.3, "attention_dropout": 0.2}, {}, "rskip_ln", {"skip_lambda": 1}),
        ({"relu_dropout": 0.3}, {}, "rskip_ln", {"skip_lambda": 1}),
        (
            {"quant_noise_pq": 0.3, "quant_noise_pq_block_size": 4},
            {},
            "rskip_ln",
            {"skip_lambda": 1},
        ),
    ],
    ids=["post-norm", "one-attention", "pre-norm", "dropout", "relu_dropout", "quant_noise"],
)
def test_same_seed_gives_stock_weights_dropout_and_gradients(
    options, stocks, arch, ours, stock_operators
):
    """Construction and dropout draw random numbers in fairseq's order.

    So runs against stock differ by the skip alone.
    """
    inputs = batch(sentences())
    losses, grads = [], []
    for name, skip in (("transformer_tiny", stocks), (f"transformer_{arch}_tiny", ours)):
        model = build(name, **TINY, **options, **skip).train()
        torch.manual_seed(5)
        loss = model(*inputs)[0].float().logsumexp(-1).sum()
        loss.backward()
        losses.append(loss.item())
        grads.append(model.encoder.layers[0].fc1.weight.grad)
    assert losses[0] == losses[1]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("arch", ALL_TINY)
def test_incremental_decoding_padding_and_company_change_nothing(arch, exact_attention):
    """They agree in float64, to the precision of fairseq's softmax.

    That is fp32 in incremental decoding only.
    """
    model = build(arch, **TINY).double()
    randomise(model)
    src, lengths, prev = batch(sentences((6, 6, 6)))
    encoder_out = model.encoder(src, src_lengths=lengths)
    full = model.decoder(prev, encoder_out=encoder_out)[0]
    state = {}
    steps = [
        model.decoder(prev[:, : i + 1], encoder_out=encoder_out, incremental_state=state)[0][:, -1]
        for i in range(prev.size(1))
    ]
    assert ((torch.stack(steps, dim=1) - full).abs().max() / full.abs().max()).item() < 1e-10
    pairs = sentences((9, 2, 5))
    left, right = (logits(model, *batch(pairs, left_pad_source=side)) for side in (True, False))
    for i, pair in enumerate(pairs):
        alone = logits(model, *batch([pair]))[0]
        for together in (left, right):
            torch.testing.assert_close(together[i, : alone.size(0)], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("arch", ALL_TINY)
def test_checkpointed_activations_give_the_same_gradients(arch):
    actual = []
    for checkpointed in (False, True):
        model = build(arch, **TINY, checkpoint_activations=checkpointed).double().train()
        torch.manual_seed(5)
        model(*batch(sentences()))[0].logsumexp(-1).sum().backward()
        actual.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*actual, rtol=1e-6, atol=1e-6)


def test_a_decoder_layer_has_attention_weights_where_they_are_asked_for():
    layer = build("transformer_rskip_ln_tiny", **TINY).decoder.layers[0]
    x, encoder_out = torch.randn(3, 2, 32), torch.randn(5, 2, 32)
    assert layer(x, encoder_out)[1].shape == (2, 3, 5)
    layer.make_generation_fast_(need_attn=False)
    assert layer(x, encoder_out)[1] is None
    assert layer(x, encoder_out, need_attn=True)[1].shape == (2, 3, 5)


@pytest.mark.parametrize("offload", [False, True])
def test_activations_are_checkpointed_where_stocks_are(offload):
    kept = []
    for arch in ("transformer_rskip_ln_tiny", "transformer_tiny"):
        options = {"checkpoint_activations": True, "offload_activations": offload}
        model = build(arch, **TINY, **options)
        layers = [*model.encoder.layers, *model.decoder.layers]
        kept.append([layer.forward.args[-1] for layer in layers])  # whether on the CPU
    assert kept[0] == kept[1] == [offload] * 4


def test_more_padding_changes_no_batch_norm_in_training(exact_attention):
    model = build("transformer_rskip_bn_tiny", **TINY, dropout=0.0).double().train()
    src, lengths, prev = batch(sentences())
    pad = dictionary().pad()
    wide = torch.nn.functional.pad(src, (4, 0), value=pad), lengths
    wide = (*wide, torch.nn.functional.pad(prev, (0, 4), value=pad))
    kept = prev.ne(pad)
    actual, expected = model(*wide)[0][:, : prev.size(1)], model(src, lengths, prev)[0]
    torch.testing.assert_close(actual[kept], expected[kept], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "blocks"),
    [({}, 2 * 2 + 2 * 3), ({"cross_self_attention": True, "no_cross_attention": True}, 8)],
    ids=["two attentions", "one attention"],
)
def test_every_block_knows_how_many_the_network_has(options, blocks):
    model = build("transformer_rskip_ln_tiny", **TINY, **options)
    actual = [skip.place.num_blocks_of_network for skip in skips(model).values()]
    assert actual == [blocks] * blocks


def count(model) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("size", "added"), [("", 30_720), ("_vaswani_wmt_en_de_big", 61_440)])
def test_lambda_2_adds_the_papers_parameters(size, added):
    one, two = (
        build(f"transformer_rskip_ln{size}", skip_lambda=n, encoder_ffn_embed_dim=8) for n in (1, 2)
    )
    assert count(two) - count(one) == added


def test_every_residual_is_a_skip_connection():
    """With F(x) = 0 a pre-activation stack is λ^n x: n counts the skips on each stream."""
    model = build("transformer_xskip_tiny", **TINY, skip_lambda=3.0)
    with torch.no_grad():
        for layer in [*model.encoder.layers, *model.decoder.layers]:
            for name, p in layer.named_parameters():
                if name.startswith(("fc2.", "self_attn.out_proj.", "encoder_attn.out_proj.")):
                    p.zero_()
    src, lengths, prev = batch(sentences((4,)))
    x, _ = model.encoder.forward_embedding(src)
    encoder_out = model.encoder(src, src_lengths=lengths)
    torch.testing.assert_close(encoder_out["encoder_out"][0].transpose(0, 1), x * 3**4)
    states = model.decoder.extract_features(prev, encoder_out)[1]["inner_states"]
    torch.testing.assert_close(states[-1], states[0] * 3**6)
