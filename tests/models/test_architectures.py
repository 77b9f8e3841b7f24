"""The table of architectures and its options, on the command line and under hydra."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq import models, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from transformer_helpers import ALL_TINY, build, dictionary, stock_defaults

from fairseq_rskip.errors import UserError
from fairseq_rskip.models.architectures import LM_SIZES, SIZES, VARIANTS
from fairseq_rskip.models.flat_config import resolve
from fairseq_rskip.models.overview import options_of_variant
from fairseq_rskip.norms import RMSNorm

STOCK_SIZES = [size for size in SIZES if size != "_iwslt_en_vi"]
SIZE_OPTIONS = [
    f"{side}_{name}"
    for side in ("encoder", "decoder")
    for name in (
        "embed_dim",
        "ffn_embed_dim",
        "layers",
        "attention_heads",
        "normalize_before",
        "learned_pos",
    )
] + ["dropout", "attention_dropout", "activation_dropout", "activation_fn", "share_all_embeddings"]
HALTING = {"skip_adapt": "halting", "skip_halt_cost": 0.1}


def parse(*argv):
    """The model config that fairseq-train would build from these options."""
    parsed = options.parse_args_and_arch(options.get_training_parser(), ["data", *argv])
    return convert_namespace_to_omegaconf(parsed).model


@pytest.mark.parametrize("size", STOCK_SIZES)
def test_sizes_are_those_of_fairseqs_architecture(size):
    """Sizes are resolved as built.

    What our config leaves to follow the encoder must come out as fairseq sets it.
    """
    stock = stock_defaults(f"transformer{size}")
    ours = resolve(MODEL_DATACLASS_REGISTRY[f"transformer_rskip_ln{size}"]())
    for name in SIZE_OPTIONS:
        assert getattr(ours, name) == getattr(stock, name), name
    assert (ours.decoder.input_dim, ours.decoder.output_dim) == (
        stock.decoder_input_dim,
        stock.decoder_output_dim,
    )


def test_an_option_overrides_the_architecture():
    cfg = parse(
        "--arch", "transformer_xskip_ln_tiny", "--skip-lambda", "0.5", "--skip-branch-scale", "3"
    )
    assert (str(cfg.skip_kind), float(cfg.skip_lambda), cfg.skip_branch_scale) == ("xskip", 0.5, 3)
    assert cfg.encoder_embed_dim == 64
    assert (cfg.share_all_embeddings, cfg.fix_norm) == (False, False)
    options = "--skip-streams 2 --skip-mixing static --skip-norm rms --encoder-embed-dim 32"
    cfg = parse("--arch", "transformer_hyper_tiny", *options.split())
    assert (str(cfg.skip_kind), cfg.skip_streams, str(cfg.skip_mixing)) == ("hyper", 2, "static")
    assert (str(cfg.skip_norm), cfg.encoder_embed_dim, cfg.encoder_ffn_embed_dim) == ("rms", 32, 64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_rule_is_an_option_of_the_architecture_without_a_rule(variant):
    own = "gpt2_init" if variant == "gpt2" else variant
    pairs = [(f"transformer_{variant}{size}", f"transformer_skip{size}") for size in SIZES]
    pairs += [(f"transformer_lm_{own}{size}", f"transformer_lm_skip{size}") for size in LM_SIZES]
    for named, plain in pairs:
        config = MODEL_DATACLASS_REGISTRY[plain](**VARIANTS[variant])
        assert vars(config) == vars(MODEL_DATACLASS_REGISTRY[named]())


@pytest.mark.parametrize("variant", ["rskip_ln", "highway", "hyper", "deepnorm", "ngpt", "kromhc"])
def test_the_model_of_skip_kind_is_that_of_the_named_architecture(variant):
    options = {"skip_kind": VARIANTS[variant]["skip_kind"]}
    words = ["--skip-kind", options["skip_kind"], *options_of_variant(variant).split()]
    parsed = parse("--arch", "transformer_skip_tiny", *words)
    assert all(getattr(parsed, name) == value for name, value in VARIANTS[variant].items())

    plain = build("transformer_skip_tiny", **VARIANTS[variant])
    named = build(f"transformer_{variant}_tiny")
    assert repr(plain).partition("\n")[2] == repr(named).partition("\n")[2]  # but for its class
    pairs = zip(plain.named_parameters(), named.named_parameters(), strict=True)
    assert all(a == b and torch.equal(p, q) for (a, p), (b, q) in pairs)

    source, target = torch.arange(4, 13).view(1, 9), torch.arange(20, 27).view(1, 7)
    lengths = torch.tensor([9])
    assert torch.equal(plain(source, lengths, target)[0], named(source, lengths, target)[0])


def test_naming_shared_embeddings_again_keeps_them():
    """fairseq turns the flag of an option that defaults to True into one that unsets it."""
    cfg = parse(
        "--arch", "transformer_rskip_ln_iwslt_en_vi", "--share-all-embeddings", "--fix-norm"
    )
    assert cfg.share_all_embeddings is True and cfg.fix_norm is True


@pytest.mark.parametrize(
    ("arch", "changes", "says"),
    [
        ("rskip_ln", {"skip_norm": "none"}, "--skip-norm none: expected one of layer"),
        ("rskip_ln", {"skip_lambda": 1.5}, "integer"),
        ("xskip_ln", {"skip_branch_scale": float("inf")}, "--skip-branch-scale inf"),
        ("wskip", {"skip_lambda": 2}, "has no such option"),
        ("xskip", {"skip_init": 2}, "--skip-init"),
        *(
            (arch, {"encoder_normalize_before": True}, f"no pre-norm (kind {kind} needs its {norm}")
            for arch, kind, norm in (
                ("rskip_ln", "rskip", "norm after the sum)"),
                ("outln", "outln", "norm behind the branch)"),
            )
        ),
        ("xskip_ln", {"decoder_normalize_before": True}, "expected 'none'"),
        *(
            (arch, {"encoder_normalize_before": True}, "-before: expected no pre-norm (kind ")
            for arch in ("b2t", "keel")
        ),
        ("ngpt", {"encoder_normalize_before": True}, "kind ngpt normalises x itself"),
        (
            "gated_residual",
            {"encoder_normalize_before": True},
            "gated_residual normalises x itself",
        ),
        ("mhc", {"skip_mixing": "static"}, "has no such option"),
        *(
            (arch, {"skip_norm": "batch"}, "expected one of none, layer, rms")
            for arch in ("x0", "layerscale", "gpt2")
        ),
        (
            "x0",
            {"encoder_layerdrop": 0.1},
            "--encoder-layerdrop 0.1: --skip-kind x0 hands several tensors",
        ),
        (
            "askip_ln",
            {**HALTING, "checkpoint_activations": True},
            "what halting costs would have no gradient there",
        ),
        (
            "askip_ln",
            {**HALTING, "offload_activations": True},
            "what halting costs would have no gradient there",
        ),
        ("residual_dual", {"decoder_layers_to_keep": "0,1"}, "--decoder-layers-to-keep 0,1"),
        (
            "scaled",
            {"encoder_layers_to_keep": "0,1"},
            "has constants or norms of a layer's number and depth",
        ),
        (
            "postln",
            {"encoder_layers_to_keep": "0,1", "skip_drop_path": 0.1},
            "has constants or norms",
        ),
        *(
            (arch, {"encoder_layers_to_keep": "0,1"}, "has constants or norms")
            for arch in ("prores", "mixln", "spannorm")
        ),
        (
            "hyper",
            {"encoder_attention_heads": 7},
            "--encoder-attention-heads 7: expected a divisor of the width "
            "with --encoder-embed-dim 64",
        ),
        (
            "xskip",
            {"encoder_ffn_embed_dim": 0},
            "--encoder-ffn-embed-dim 0: expected an integer >= 1",
        ),
        ("xskip", {"encoder_embed_dim": 0}, "--encoder-embed-dim 0: expected an integer >= 1"),
        # not the encoder's, as without the option
        ("xskip", {"decoder_embed_dim": 0}, "--decoder-embed-dim 0: expected an integer >= 1"),
        (
            "xskip",
            {"decoder_ffn_embed_dim": 0},
            "--decoder-ffn-embed-dim 0: expected an integer >= 1",
        ),
        ("lm_xskip", {"decoder_input_dim": 0}, "--decoder-input-dim 0: expected an integer >= 1"),
        ("deepnorm", {"skip_rank": 1}, "--skip-rank 1: kind deepnorm has no such option"),
        ("postln", {"skip_log_interval": -1}, "-log-interval -1: expected an integer >= 0"),
    ],
)
def test_a_contradiction_is_one_clear_line(arch, changes, says):
    with pytest.raises(UserError) as refused:
        build(f"transformer_{arch}_tiny", **changes)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_shared_embeddings_need_one_dictionary():
    two = SimpleNamespace(source_dictionary=dictionary(40), target_dictionary=dictionary(41))
    with pytest.raises(UserError, match="--joined-dictionary"):
        models.build_model(Namespace(arch="transformer_rskip_ln_iwslt_en_vi"), two)


def test_a_namespace_without_our_options_gets_the_architectures():
    """What from_pretrained and old callers hand over."""
    model = ARCH_MODEL_REGISTRY["transformer_rskip_ln_tiny"]
    config = MODEL_DATACLASS_REGISTRY["transformer_rskip_ln_tiny"].from_namespace(
        Namespace(dropout=0.3)
    )
    assert model.__name__ == "transformer_rskip_ln_tiny"
    assert (config.dropout, config.skip_norm, config.encoder_embed_dim) == (0.3, "layer", 64)


@pytest.mark.parametrize("arch", ALL_TINY)
def test_every_architecture_is_built_on_meta(arch):
    """So ``from_pretrained`` finds a model's size before it takes memory for it."""
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in build(arch).parameters())


def test_the_last_norm_of_a_pre_norm_kind_is_its_own():
    for given in ({}, {"encoder_normalize_before": True, "decoder_normalize_before": True}):
        model = build("transformer_rmsnorm_tiny", **given)
        assert all(
            isinstance(stack.layer_norm, RMSNorm) for stack in (model.encoder, model.decoder)
        )
