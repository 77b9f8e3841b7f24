"""Language models: stock fairseq's at λ = 1, and every rule of the table.

Training is with fairseq's own commands.
"""

import json
import math
from argparse import Namespace

import pytest
import text_corpus
import torch
from conftest import run_checked
from fairseq.models import MODEL_DATACLASS_REGISTRY
from transformer_helpers import build, dictionary, pad, randomise, sentences, stock_defaults

from fairseq_rskip.errors import UserError
from fairseq_rskip.models.architectures import arch_configs
from fairseq_rskip.models.flat_config import SkipLanguageModelConfig
from fairseq_rskip.residual import skips

TINY = {
    "decoder_embed_dim": 32,
    "decoder_ffn_embed_dim": 48,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
}
TINY |= {
    "decoder_input_dim": 32,
    "decoder_output_dim": 32,
    "tokens_per_sample": 64,
    "max_target_positions": 64,
}
EVERY = [
    arch
    for arch, _ in arch_configs(SkipLanguageModelConfig)
    if arch.endswith("_tiny") and "tfixup" not in arch
]
ADAPTIVE = {
    "adaptive_input": True,
    "adaptive_input_cutoff": "10,20",
    "adaptive_softmax_cutoff": "10,20",
}
TIED = {**ADAPTIVE, "tie_adaptive_weights": True, "tie_adaptive_proj": True}
PRE_NORM = {"decoder_normalize_before": True}
OPTIONS = [
    {},
    {"share_decoder_input_output_embed": True},
    {"layernorm_embedding": True, "decoder_input_dim": 16, "decoder_output_dim": 24},
    {"decoder_learned_pos": True, "no_decoder_final_norm": True},
    ADAPTIVE,
    TIED,
    {"decoder_layers_to_keep": "1"},
    {"activation_dropout": 0.3, "attention_dropout": 0.2},
    {**ADAPTIVE, "quant_noise_pq": 0.3, "quant_noise_pq_block_size": 2},
]
CASES = [
    (f"transformer_lm_{arch}_tiny", {"skip_lambda": 1}, {}, {}) for arch in ("postln", "xskip_ln")
]
CASES += [("transformer_lm_xskip_tiny", {"skip_lambda": 1, **PRE_NORM}, PRE_NORM, {})]
CASES += [("transformer_lm_rskip_ln_tiny", {"skip_lambda": 1}, {}, options) for options in OPTIONS]
CASES += [("transformer_lm_preln_tiny", {}, PRE_NORM, options) for options in OPTIONS]


def tokens(lengths=(9, 4, 6)):
    return pad([[dictionary().eos(), *source] for source, _ in sentences(lengths)])


def log_probabilities(model, inputs):
    return model.get_normalized_probs(model(inputs), log_probs=True)


@pytest.mark.parametrize(
    ("arch", "ours", "stock", "options"), CASES, ids=[f"{c[0]} {' '.join(c[3])}" for c in CASES]
)
def test_lambda_1_is_stock_fairseqs_language_model(arch, ours, stock, options, stock_operators):
    """A fresh one has the same weights from the same seed.

    One that loads a stock checkpoint says the same.
    """
    theirs = build("transformer_lm", **{**TINY, **options, **stock})
    model = build(arch, **{**TINY, **options, **ours})
    assert torch.equal(log_probabilities(model, tokens()), log_probabilities(theirs, tokens()))
    randomise(theirs)
    model.load_state_dict(theirs.state_dict(), strict=True)
    assert torch.equal(log_probabilities(model, tokens()), log_probabilities(theirs, tokens()))
    draws = []
    for each in (model, theirs):
        torch.manual_seed(5)
        draws += [(log_probabilities(each.train(), tokens()), torch.get_rng_state())]
    assert all(torch.equal(one, other) for one, other in zip(*draws))


@pytest.fixture(params=EVERY)
def random_model(request, exact_attention):
    """A small language model of each rule in float64, with random parameters."""
    model = build(request.param, **TINY).double()
    randomise(model)
    return model


def test_decoding_token_by_token_gives_the_logits_of_the_whole_text(random_model):
    inputs = tokens((6, 6, 6))
    whole = random_model(inputs)[0]
    state: dict = {}
    by_token = []
    for length in range(1, inputs.size(1) + 1):
        logits, _ = random_model.decoder(inputs[:, :length], incremental_state=state)
        by_token.append(logits[:, -1])
    difference = (torch.stack(by_token, 1) - whole).abs().max() / whole.abs().max()
    assert difference.item() < 1e-10


def test_every_parameter_of_a_language_model_has_a_finite_gradient(random_model):
    random_model(tokens((6, 6, 6)))[0].logsumexp(-1).sum().backward()
    for name, parameter in random_model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_the_network_of_a_language_model_is_its_decoder(random_model):
    """Two layers of two sublayers: no attention to an encoder."""
    places = [skip.place for skip in skips(random_model).values()]
    assert [place.num_blocks_of_network for place in places] == [4] * 4


def test_padding_and_other_texts_of_a_batch_do_not_change_a_text(random_model):
    inputs = tokens()
    for text, of_batch in zip(inputs, random_model(inputs)[0], strict=True):
        text = text[text.ne(dictionary().pad())]
        alone = random_model(text[None])[0][0]
        torch.testing.assert_close(of_batch[: len(text)], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", ["", "_gpt", "_wiki103"])
def test_sizes_are_those_of_fairseqs_architecture(size):
    stock = stock_defaults(f"transformer_lm{size}") if size else Namespace()
    values = {**vars(MODEL_DATACLASS_REGISTRY["transformer_lm"]()), **vars(stock)}
    ours = MODEL_DATACLASS_REGISTRY[f"transformer_lm_preln{size}"]()
    followed = {"decoder_input_dim", "decoder_output_dim"}
    own = {"decoder_normalize_before", "add_bos_token"}  # here the rule's and the task's
    differing = {
        name
        for name, value in values.items()
        if hasattr(ours, name) and getattr(ours, name) != value
    }
    assert differing <= followed | own
    assert all(
        values[name] == values["decoder_embed_dim"] and getattr(ours, name) is None
        for name in followed
    )


@pytest.mark.parametrize(
    ("arch", "changes", "says"),
    [
        (
            "tfixup_tiny",
            {},
            "kind tfixup is derived for an encoder and a decoder: expected a model with an encoder",
        ),
        (
            "hyper_tiny",
            {"decoder_layerdrop": 0.1},
            "--decoder-layerdrop 0.1: --skip-kind hyper hands several tensors",
        ),
        ("scalenorm_wiki103", {}, "--fix-norm: expected neither --adaptive-input nor"),
        (
            "rskip_ln_wiki103",
            {"adaptive_input_cutoff": "10,18"},
            "--tie-adaptive-weights: expected --adaptive-input with",
        ),
    ],
)
def test_a_contradiction_is_one_clear_line(arch, changes, says):
    with pytest.raises(UserError) as refused:
        build(f"transformer_lm_{arch}", **{**TINY, **changes})
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_offloaded_activations_are_checkpointed():
    model = build("transformer_lm_rskip_ln_tiny", **TINY, offload_activations=True)
    assert [layer.forward.args[-1] for layer in model.decoder.layers] == [True, True]


def test_a_text_is_as_long_as_the_tasks_samples():
    options = {**TINY, "tokens_per_sample": 48}
    del options["max_target_positions"]
    assert build("transformer_lm_rskip_ln_tiny", **options).max_positions() == 48


def test_growth_is_that_of_the_decoder(caplog):
    build("transformer_lm_xskip", **{**TINY, "decoder_layers": 6})
    assert "about 2^12 = 4.1e+03 through the decoder." in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch",
    [
        "rskip_ln_tiny",
        "askip_ln_tiny --skip-adapt gradient",
        "admin_wiki103 --adaptive-input-cutoff 5,8",
    ],
)
def test_fairseq_trains_and_scores_it(arch, letters, tmp_path):
    """It is profiled or not, and has adaptive softmax in one case.

    fairseq-eval-lm agrees with the validation of the training.
    """
    arch, *options = arch.split()
    if "wiki103" in arch:
        options += (
            "--adaptive-softmax-cutoff 5,8 --criterion adaptive_loss --ddp-backend legacy_ddp "
            "--decoder-layers 2 --decoder-embed-dim 32 --decoder-ffn-embed-dim 32 --dropout 0"
        ).split()
    log = text_corpus.train(letters, tmp_path, arch, *options)
    losses = [
        float(json.loads(r[r.index("{") :])["valid_loss"])
        for r in log.splitlines()
        if '"valid_loss"' in r
    ]
    assert losses[-1] < losses[0] < math.log2(10) + 0.5
    assert ("profiled 4 skip connections" in log) == ("rskip" not in arch)
    data = [letters, "--gen-subset", "valid", "--path", tmp_path / "checkpoint_last.pt"]
    task = (
        "--task language_modeling --tokens-per-sample 32 --sample-break-mode none "
        "--max-tokens 600 --cpu"
    ).split()
    printed = run_checked(
        ["fairseq-eval-lm", *data, *text_corpus.PLUGIN, *task, "--num-workers", "0"]
    )
    scored = printed.partition("Loss (base 2): ")[2]
    if (
        "wiki103" not in arch
    ):  # adaptive_loss takes the second word of each tail for padding, whose index is 1
        assert float(scored.partition(",")[0]) == pytest.approx(
            losses[-1], abs=2e-3
        )  # the log has three decimals
