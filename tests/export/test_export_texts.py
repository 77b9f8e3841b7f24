"""An exported language model: fairseq-eval-lm's perplexity from the folder alone, and text drawn
from it.
"""

import json
import shutil

import pytest
import text_corpus
import torch
from evaluation_corpus import follow_in_server
from test_export import card, export, refused

import fairseq_rskip
from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.__main__ import main as rskip
from fairseq_rskip.tools.evaluate import generation

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scored(language_model):
    """The scores.json of rskip evaluate, with a context window."""
    data, folder = language_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "follow", follow_in_server)
        words = [
            "evaluate",
            data,
            folder,
            "--cpu",
            "--context-window",
            8,
            "--out",
            folder / "evaluation-8",
        ]
        assert rskip([str(word) for word in words]) == 0
    return json.loads((folder / "evaluation-8" / "scores.json").read_text())


@pytest.fixture(scope="module")
def model(language_model, scored, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "ein Modell"
    copy = shutil.copytree(
        language_model[1], folder.parent / "copy"
    )  # its times, too, which tell checkpoints apart
    assert export(copy / "checkpoint_best.pt", folder, "--data", language_model[0]) == 0
    shutil.rmtree(copy)
    return fairseq_rskip.from_pretrained(folder), folder


def test_the_perplexity_is_that_of_evaluate(language_model, model, scored):
    text = (language_model[0] / "raw" / "test.en").read_text("utf-8")
    actual = model[0].score(text, context_window=8)
    assert actual.perplexity == pytest.approx(scored["perplexity"]["subword"], rel=1e-6)
    assert actual.bits_per_byte == pytest.approx(scored["bits"]["byte"], rel=1e-6)
    assert (len(actual.tokens), actual.bytes) == (scored["tokens"], scored["bytes"])
    assert model[0].score("a b c").tokens == ["a", "b", "c", "</s>"]
    for wrong in ("", " \n", ["a", "b"], None):
        with pytest.raises(UserError, match="expected a text of one or more lines, not blank"):
            model[0].score(wrong)
    assert model[0].score("a b c").bits < model[0].score("a c b").bits
    with pytest.raises(UserError, match="context_window=32: expected an integer from 0 to 31"):
        model[0].score("a", context_window=32)


def test_samples_follow_the_models_probabilities(model):
    """Of a text in which a letter follows another, mostly, as in the alphabet; a search finds the
    likeliest.
    """
    state = torch.get_rng_state()
    first = model[0].sample("a b c", seed=1, max_len_b=9)
    assert first.startswith("a b c ") and first == model[0].sample("a b c", seed=1, max_len_b=9)
    assert len({model[0].sample("a b c", seed=seed) for seed in range(5)}) > 1
    assert torch.equal(state, torch.get_rng_state())
    assert model[0].sample("a b c", sampling=False, beam=4, max_len_b=3).startswith("a b c d")
    with pytest.raises(UserError, match="the prompt has 41 tokens, the model takes 31"):
        model[0].sample("a " * 40)
    with pytest.raises(UserError, match="^prompt=.'a', 'b'.: expected one text$"):
        model[0].sample(["a", "b"])
    with pytest.raises(UserError, match="^temperature=0: expected a number above 0$"):
        model[0].sample("a", temperature=0)


def test_a_model_that_was_trained_with_a_first_symbol_gets_it(model, monkeypatch):
    ours = model[0]
    monkeypatch.setattr(ours.task.args, "add_bos_token", True)
    tokens = ours.encode("a b c")
    inputs = torch.tensor([ours.src_dict.bos(), ours.src_dict.eos(), *tokens[:-1]])
    with torch.no_grad():
        log_probabilities = ours.models[0](inputs[None])[0][0].log_softmax(-1)
    expected = log_probabilities[1:].gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(ours.score("a b c").log_probabilities, expected)


def test_a_language_model_does_not_translate(model):
    with pytest.raises(UserError, match=r"does not translate; it has score\(text\) and sample"):
        model[0].translate("a b")


def test_the_card_has_the_perplexity(model, scored):
    header, text = card(model[1])
    assert (header["pipeline_tag"], header["language"]) == ("text-generation", ["en"])
    assert "model.score(" in text and "model.translate(" not in text
    names = sorted(path.name for path in model[1].iterdir())
    assert names == ["README.md", "config.json", "dict.txt", "model.safetensors", "training.json"]
    assert f"* perplexity per subword: {scored['perplexity']['subword']:.2f}" in text


def test_a_stock_language_model_is_exported_as_ours(letters, tmp_path):
    text_corpus.train(letters, tmp_path / "stock", "gpt2_tiny", "--max-update", 5)
    assert (
        export(tmp_path / "stock" / "checkpoint_last.pt", tmp_path / "out", "--data", letters) == 0
    )
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["architecture"]
        == "transformer_lm_xskip"
    )
    assert fairseq_rskip.from_pretrained(tmp_path / "out").score("a b").bits > 0


def test_data_of_another_task_is_one_line(language_model, translator, tmp_path, capfd):
    for model, data in ((language_model[1], translator[0]), (translator[1], language_model[0])):
        assert str(data) in refused(capfd, model, tmp_path / "out", "--data", data)
