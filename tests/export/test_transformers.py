"""rskip export --transformers: the same logits and the same text in Hugging Face transformers.

``make test-peers`` installs that package.
"""

import importlib
import re

import pytest
import torch
from conftest import run_command
from sentencepiece import SentencePieceTrainer
from test_export import card, export, refused
from transformer_helpers import build, dictionary, randomise

import fairseq_rskip
from fairseq_rskip.errors import UserError
from fairseq_rskip.pretrained.hub import detokeniser, splitter
from fairseq_rskip.tools.export import hugging_face, tokenising

TINY = {"decoder_embed_dim": 32, "decoder_ffn_embed_dim": 48, "decoder_layers": 3}
TINY |= {"decoder_attention_heads": 2, "tokens_per_sample": 24, "max_target_positions": 24}
TINY |= {"tpu": False, "add_bos_token": False}
LEARNED = {"decoder_learned_pos": True, "share_decoder_input_output_embed": True}
NO_POSITIONS = {"no_token_positional_embeddings": True, "no_scale_embedding": True}
# architecture, options, and whether it is GPT-2's own network
CASES = {
    "pre-norm": ("preln", {}, True),
    "pre-norm, learned positions, shared output": ("preln", LEARNED, True),
    "pre-norm, no positions": ("preln", NO_POSITIONS, True),
    "pre-norm, LayerDrop": ("preln", {"decoder_layerdrop": 0.5}, True),
    "GPT-2's start": ("gpt2_init", {}, True),
    "stock pre-norm": ("xskip", {"skip_lambda": 1, "decoder_normalize_before": True}, True),
    "pre-norm, 0.5x + 2F": ("preln", {"skip_lambda": 0.5, "skip_branch_scale": 2}, False),
    "pre-norm, no last norm": ("preln", {"no_decoder_final_norm": True}, False),
    "pre-norm, norm of embedding": ("preln", {"layernorm_embedding": True}, False),
    "RMSNorm": ("rmsnorm", {}, False),
    "CompleteP": ("completep", {}, False),
    "post-norm": ("postln", {}, False),
    "post-norm, learned positions, shared output": ("postln", LEARNED, False),
    "post-norm, no positions": ("postln", NO_POSITIONS, False),
    "post-norm, LayerDrop": ("postln", {"decoder_layerdrop": 0.5}, False),
    "2xSkip": ("xskip", {}, False),
    "3xSkip+LN": ("xskip_ln", {"skip_lambda": 3}, False),
    "2rSkip+LN": ("rskip_ln", {}, False),
    "3rSkip+LN, alpha 2": ("rskip_ln", {"skip_lambda": 3, "skip_branch_scale": 2}, False),
    "2rSkip+RMS": ("rskip_ln", {"skip_norm": "rms"}, False),
    "DeepNorm": ("deepnorm", {}, False),
    "fixed 1/sqrt(L)": ("scaled", {}, False),
    "residual scaling": ("residual_scaling", {}, False),
}
for name in ("relu_squared", "tanh", "linear"):
    CASES[f"pre-norm, {name}"] = ("preln", {"activation_fn": name}, True)
    CASES[f"2rSkip+LN, {name}"] = ("rskip_ln", {"activation_fn": name}, False)
GELU = {
    f"{arch}, {name}": (arch, {"activation_fn": name}, arch == "preln")
    for arch in ("preln", "rskip_ln")
    for name in ("gelu", "gelu_accurate")
}


@pytest.fixture
def transformers(tmp_path, monkeypatch):
    """The package, which copies an export's code into this test's folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    try:
        module = importlib.import_module("transformers")
    except ImportError as error:
        pytest.skip(f"transformers is not installed ({error}): make test-peers installs it")
    cache = str(tmp_path / "cache")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    monkeypatch.setattr("sys.path", [cache, *importlib.import_module("sys").path])
    return module


def model_of(arch, options):
    """A language model of fairseq with weights that nothing has trained, in float64."""
    model = build(f"transformer_lm_{arch}_tiny", **{**TINY, **options})
    randomise(model)
    return model.double()


def loaded(transformers, folder, is_gpt2):
    """The export; GPT-2's without the permission to run code."""
    options = {"dtype": torch.float64}
    if not is_gpt2:
        options["trust_remote_code"] = True
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def tokens(*shape):
    """Token numbers without special symbols but the first, which begins a text."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(4, len(dictionary()), shape, generator=generator)
    drawn[:, 0] = dictionary().eos()
    return drawn


def greedy(model, start, steps):
    """``start``, ``(1, length)``, and the likeliest next token, again and again; never padding."""
    for _ in range(steps):
        logits = model(start)[0][:, -1]
        logits[:, dictionary().pad()] = -torch.inf
        start = torch.cat([start, logits.argmax(1, keepdim=True)], 1)
    return start


@pytest.mark.parametrize("case", [*CASES, *GELU])
@torch.no_grad()
def test_logits_are_the_models(case, transformers, tmp_path, stock_operators, exact_attention):
    """In float64 the two differ by the order of additions alone. fairseq computes gelu in fp32,
    whose rounding, 6e-8, the norms of three layers multiply.
    """
    arch, options, is_gpt2 = {**CASES, **GELU}[case]
    tolerance = 1e-4 if case in GELU else 1e-9
    model = model_of(arch, options)
    hugging_face.write_model(tmp_path, model)
    actual = loaded(transformers, tmp_path, is_gpt2)
    assert type(actual).__name__ == ("GPT2LMHeadModel" if is_gpt2 else "SkipLMForCausalLM")
    assert actual.dtype == torch.float64

    text = tokens(3, 24)
    expected = model(text)[0]
    torch.testing.assert_close(actual(text).logits, expected, rtol=tolerance, atol=tolerance)
    log_probabilities = expected[:, :-1].log_softmax(-1).gather(2, text[:, 1:, None])
    loss = -log_probabilities.mean()
    # transformers computes the loss in fp32
    torch.testing.assert_close(actual(text, labels=text).loss.double(), loss, rtol=1e-5, atol=1e-5)

    padded = torch.cat([text.new_full((3, 4), dictionary().pad()), text[:, :9]], 1)
    kept = padded != dictionary().pad()
    positions = {"position_ids": (kept.cumsum(1) - 1).clamp(min=0)} if is_gpt2 else {}
    logits = actual(padded, attention_mask=kept.long(), **positions).logits[:, 4:]
    torch.testing.assert_close(logits, expected[:, :9], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", ["pre-norm", "post-norm", "2xSkip", "2rSkip+LN"])
@torch.no_grad()
def test_generation_is_greedy_search(case, transformers, tmp_path, stock_operators):
    arch, options, is_gpt2 = CASES[case]
    model = model_of(arch, options)
    (tmp_path / "first").mkdir()
    hugging_face.write_model(tmp_path / "first", model)
    actual = loaded(transformers, tmp_path / "first", is_gpt2)
    actual.save_pretrained(tmp_path / "again")
    again = loaded(transformers, tmp_path / "again", is_gpt2)

    text = tokens(2, 5)
    search = {"do_sample": False, "max_new_tokens": 9, "eos_token_id": None}
    expected = torch.cat([greedy(model, row[None], 9) for row in text])
    for each in (actual, again):
        for cache in (False, True):
            ours = each.generate(text, use_cache=cache, **search)
            assert torch.equal(ours, expected)
    padded = torch.cat([text.new_full((2, 3), dictionary().pad()), text], 1)
    kept = (padded != dictionary().pad()).long()
    assert torch.equal(actual.generate(padded, attention_mask=kept, **search)[:, 3:], expected)
    assert torch.equal(again(text).logits, actual(text).logits)
    with pytest.raises(ValueError, match="backend tokenizer"):
        transformers.AutoTokenizer.from_pretrained(tmp_path / "first", trust_remote_code=True)


def test_every_rule_of_the_table_has_a_case():
    kinds = {build(f"transformer_lm_{arch}_tiny", **TINY).decoder for arch, _, _ in CASES.values()}
    assert {hugging_face.rule_of(decoder).skip_kind for decoder in kinds} == set(
        hugging_face.CONVERTED_KINDS
    )


ADAPTIVE = {"adaptive_input": True, "adaptive_input_cutoff": "5,10"}
REFUSED = {
    "a gate": ("highway", {}, "cannot express the rule highway with layer norm: expected xskip, "),
    "batch norm": ("rskip_bn", {}, "cannot express the rule rskip with batch norm"),
    "unit embeddings": ("scalenorm", {}, "has adaptive inputs or embeddings of unit length"),
    "adaptive inputs": ("preln", ADAPTIVE, "has adaptive inputs or embeddings of unit length"),
    "adaptive softmax": ("preln", {"adaptive_softmax_cutoff": "5,10"}, "has an adaptive softmax"),
    "other width": ("preln", {"decoder_input_dim": 16}, "has embeddings of another width"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_express_is_one_line(case, tmp_path):
    arch, options, words = REFUSED[case]
    with pytest.raises(UserError) as error:
        hugging_face.write_model(
            tmp_path, build(f"transformer_lm_{arch}_tiny", **{**TINY, **options})
        )
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


SENTENCES = ["It's a low-lying  house, isn't it?", "A lower “low” & the lowest … löw."]
TOKENS = {
    "words": ("none", "none", False),
    "Moses": ("moses", "none", True),
    "Moses and subword-nmt": ("moses", "subword-nmt", False),
    "sentencepiece": ("none", "sentencepiece", False),
}


@pytest.mark.parametrize("case", TOKENS)
def test_the_cards_lines_make_the_corpuss_tokens(case, tmp_path):
    """And join them again. Between them, a run of blanks becomes one, as in every corpus."""
    tokenizer, bpe, normalise = TOKENS[case]
    config = {"source": "en", "target": "", "tokenizer": tokenizer, "bpe": bpe}
    config.update(subwords={"en": "subwords.en"}, normalise_punctuation=normalise)
    subwords = tmp_path / "subwords.en"
    if bpe == "subword-nmt":
        subwords.write_text("#version: 0.2\nl o\nlo w</w>\ni s\n")
    if bpe == "sentencepiece":
        with open(subwords, "wb") as file:
            sizes = {"vocab_size": 32, "minloglevel": 2}
            SentencePieceTrainer.train(
                sentence_iterator=iter(SENTENCES), model_writer=file, **sizes
            )
    for sentence in SENTENCES:
        names = {"text": sentence}
        code = tokenising.imports(config) + tokenising.split(config)
        exec(code.replace("DIR", str(tmp_path)), names)
        expected = splitter(config, tmp_path)(sentence)
        assert names["pieces"] == expected.split()
        joined = {"subword-nmt": expected.replace("@@ ", "")}.get(bpe, expected)
        if bpe == "sentencepiece":
            joined = expected.replace(" ", "").replace("\u2581", " ").strip()
        assert eval(tokenising.joined(config), names) == detokeniser(config)(joined)


@pytest.mark.slow
def test_the_cards_example_prints_our_text(language_model, transformers, tmp_path):
    data, folder = language_model
    ours, theirs = tmp_path / "ours", tmp_path / "their model"
    checkpoint = folder / "checkpoint_best.pt"
    assert export(checkpoint, ours, "--data", data) == 0
    assert export(checkpoint, theirs, "--data", data, "--transformers") == 0
    names = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    names += ["modeling_skip_lm.py", "symbols.json", "tokenizer_config.json", "training.json"]
    assert sorted(path.name for path in theirs.iterdir()) == names
    header, text = card(theirs)
    assert (header["library_name"], header["pipeline_tag"]) == ("transformers", "text-generation")
    assert "trust_remote_code=True" in text and "`rskip` (lambda 2, alpha 1): " in text

    code = re.search("```python\n(.*?)```", text, re.S).group(1)
    code = code.replace('"A text"', '"a b c"').replace("DIR", str(theirs))
    cache = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = run_command(["python", "-c", code], env=cache)
    assert done.returncode == 0, done.stderr
    model = fairseq_rskip.from_pretrained(ours)
    # its positions are 32, and the first of the card's tokens is the start of the line
    expected = model.sample("a b c", sampling=False, beam=1, max_len_a=0, max_len_b=31)
    assert done.stdout == expected + "\n" and expected.startswith("a b c d e f")


@pytest.mark.slow
def test_a_translator_is_refused(translator, tmp_path, capfd):
    line = refused(
        capfd, translator[1], tmp_path / "out", "--data", translator[0], "--transformers"
    )
    assert "was trained for --task translation: expected language_modeling" in line
    assert not list(tmp_path.iterdir())
