"""rskip export and from_pretrained: the same text and the same error as before, from the folder
alone; the card.
"""

import io
import json
import shutil
import sys

import pytest
import torch
import yaml
from conftest import ROOT, run_checked
from evaluation_corpus import TRAINING
from safetensors.torch import load_file, save_file
from vision_helpers import error_line, train

import fairseq_rskip
from fairseq_rskip.errors import UserError
from fairseq_rskip.pretrained.hub import detokeniser
from fairseq_rskip.residual import Place, create_skip, own_rules
from fairseq_rskip.safe_load import load_checkpoint
from fairseq_rskip.tools import translate
from fairseq_rskip.tools.__main__ import main as rskip
from fairseq_rskip.tools.export.card import Card, rule_line
from fairseq_rskip.tools.export.card import write as write_card
from fairseq_rskip.tools.export.main import copy_own_rules, to_half
from fairseq_rskip.vision.config import Config
from fairseq_rskip.vision.data import load

pytestmark = pytest.mark.slow


def export(*words):
    return rskip(["export", *map(str, words)])


def card(folder):
    """The header as data, and the text below it."""
    _, header, text = (folder / "README.md").read_text("utf-8").split("---\n", 2)
    assert not any(line.endswith(" ") for line in text.split("\n"))
    return yaml.safe_load(header), text


def settings(folder):
    """The settings of the training."""
    return json.loads((folder / "training.json").read_text("utf-8"))


def refused(capfd, *words):
    """The one line of an export that is refused."""
    capfd.readouterr()
    assert export(*words) == 1
    return error_line(capfd.readouterr().err)


@pytest.fixture(scope="module")
def exported(translator, translated, tmp_path_factory):
    """The averaged weights that evaluate.sh translated with, exported from copies that are gone."""
    base = tmp_path_factory.mktemp("geteilt")
    shutil.copytree(translator[0], base / "data")
    shutil.copytree(translator[1], base / "model")
    folder = base / "ein Modell"
    assert (
        export(base / "model" / "evaluation-test" / "averaged.pt", folder, "--data", base / "data")
        == 0
    )
    for name in ("data", "model"):
        shutil.rmtree(base / name)
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """The folder of a seed of digits, trained for seconds, and its export."""
    base = tmp_path_factory.mktemp("số")
    options = {"iterations": 60, "batch_size": 40, "milestones": [50], "train_images": 200}
    train(None, base / "run", "digits", skip_lambda=3, width=12, **options)
    assert export(base / "run" / "seed1", base / "shared") == 0
    return base / "run" / "seed1", base / "shared"


@pytest.fixture(scope="module")
def texts(translator, translated):
    """The plain source sentences, and the translations of rskip evaluate."""
    paths = (translator[0] / "data-bin" / "raw" / "test.en", translated[1] / "hyp.txt")
    return [path.read_text("utf-8").splitlines() for path in paths]


def test_the_text_is_that_of_evaluate_from_the_folder_alone(texts, exported):
    sentences, expected = texts
    for model in (
        fairseq_rskip.from_pretrained(exported),
        torch.hub.load(str(ROOT), "transformer_rskip", str(exported), source="local"),
    ):
        assert model.translate(sentences) == expected
    assert model.translate(sentences[3]) == expected[3]
    actual = model.generate([model.encode(sentence) for sentence in sentences[:5]], beam=4)
    assert [model.decode(hypotheses[0]["tokens"]) for hypotheses in actual] == expected[:5]


def test_an_average_of_rskip_run_is_checked_against_its_vocabulary(translator, tmp_path, capsys):
    """It is in RUN/seed1/evaluation, and the dictionaries are in RUN/seed1/checkpoints."""
    run = tmp_path / "seed1"
    shutil.copytree(translator[1], run / "checkpoints")
    (run / "evaluation").mkdir()
    average = shutil.copy(run / "checkpoints" / "checkpoint_best.pt", run / "evaluation" / "a.pt")
    (dictionary, *_) = sorted((run / "checkpoints").glob("dict.*.txt"))
    first, second, *others = dictionary.read_text("utf-8").splitlines(keepends=True)
    dictionary.write_text("".join([second, first, *others]), "utf-8")
    assert export(average, tmp_path / "out", "--data", translator[0]) == 1
    assert "holds checkpoints of another vocabulary" in capsys.readouterr().err

    checkpoints = run / "checkpoints"  # several, whose average is made elsewhere
    for command in (["export", checkpoints, tmp_path / "out"], ["translate", checkpoints, "--cpu"]):
        assert rskip([*map(str, command), "--data", str(translator[0])]) == 1
        expected = f"error: {checkpoints} holds checkpoints of another vocabulary"
        assert capsys.readouterr().err.splitlines()[-1].startswith(expected)


def test_punctuation_is_normalised_where_the_corpuss_was(translator, tmp_path):
    data = shutil.copytree(translator[0], tmp_path / "data")
    file = data / "data-bin" / "preparation.json"
    about = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**about, "normalise_punctuation": True}))
    out = tmp_path / "out"
    assert export(translator[1] / "checkpoint_best.pt", out, "--data", data) == 0
    split = fairseq_rskip.from_pretrained(out).to_tokens
    assert split("It’s a “red” house.") == split('It\'s a "red" house.')
    # others may read the weights if they may read the settings
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode


def test_output_is_detokenised_by_the_rules_of_its_own_language():
    config = {"tokenizer": "moses", "source": "en", "target": "fr"}
    assert detokeniser(config)("l&apos; été") == "l'été"
    assert detokeniser({**config, "source": "fr", "target": ""})("l&apos; été") == "l'été"


def test_translate_reads_and_writes_lines(translator, texts, exported, monkeypatch, capsys):
    """From the export and from the folder of checkpoints, whose last five are averaged; empty lines
    stay empty.
    """
    (one, two, three, four, *_), expected = texts
    monkeypatch.setattr(translate, "BATCH", 3)
    for model in (exported, translator[1]):
        text = "\n".join(["", one, two, three, " \u200b", four])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert rskip(["translate", str(model), "--cpu"]) == 0
        assert capsys.readouterr().out.splitlines() == ["", *expected[:3], "", expected[3]]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(one.encode() + b"\nsch\xf6n\n")))
    assert rskip(["translate", str(exported), "--cpu"]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines() == expected[:1]  # what was read before is translated
    assert "line 2 of standard input is not valid UTF-8" in error_line(printed.err)


def test_half_stores_the_weights_rounded_to_fp16(classifier, tmp_path):
    seed, full = classifier
    assert export(seed, tmp_path / "half", "--half") == 0
    stored = load_file(tmp_path / "half" / "model.safetensors")
    for name, tensor in load_file(full / "model.safetensors").items():
        is_weight = tensor.is_floating_point() and "running_" not in name
        assert torch.equal(stored[name], tensor.half() if is_weight else tensor)
    weight = fairseq_rskip.from_pretrained(tmp_path / "half").state_dict()["fc.weight"]
    assert weight.dtype == torch.float32 and torch.equal(weight, stored["fc.weight"].float())


def test_half_keeps_large_statistics_and_refuses_large_weights():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[1].running_var.fill_(1e6)
    to_half(model)
    assert model[1].running_var.eq(1e6).all() and model[0].weight.dtype == torch.float16
    with torch.no_grad():
        model.float()[0].weight.fill_(1e6)
    with pytest.raises(UserError, match=r"^--half: fp16 cannot hold 0\.weight; export without it$"):
        to_half(model)


def test_class_names_may_have_commas_and_older_runs_have_none(classifier, tmp_path):
    result = json.loads((classifier[0] / "result.json").read_text("utf-8"))
    shutil.copy(classifier[0] / "checkpoint.pt", tmp_path)
    names = [f"tench, number {number}" for number in range(10)]
    for written, read in ((names, names), (None, [*map(str, range(10))])):
        if written is None:
            del result["class_names"]
        else:
            result["class_names"] = written
        (tmp_path / "result.json").write_text(json.dumps(result))
        assert export(tmp_path, tmp_path / f"out {len(read[0])}") == 0
        model = fairseq_rskip.from_pretrained(tmp_path / f"out {len(read[0])}")
        assert list(model.classes) == read
    model.bfloat16().classify(torch.zeros(1, 32, 32, 3, dtype=torch.uint8))


def test_a_model_that_is_nowhere_is_one_line():
    with pytest.raises(UserError, match="^nowhere does not exist; expected a folder that rskip"):
        fairseq_rskip.from_pretrained("nowhere")


def test_options_of_the_search_are_fairseqs(exported):
    model = fairseq_rskip.from_pretrained(exported)
    short = model.translate("It's a red house, isn't it?", beam=2, max_len_a=0, max_len_b=3)
    assert short != model.translate("It's a red house, isn't it?")
    for mistake, sentences, options in (
        ("no option beams of its search", "It's a red house.", {"beams": 3}),
        ("^'a a a .* has 1101 tokens, the model takes 1024$", ["a", "a " * 1100], {}),
    ):
        with pytest.raises(UserError, match=mistake):
            model.translate(sentences, **options)


def test_the_card_of_a_translator(translated, exported):
    header, text = card(exported)
    assert (header["language"], header["pipeline_tag"]) == (["en", "de"], "translation")
    for row in json.loads((translated[1] / "scores.json").read_text("utf-8"))["scores"]:
        signature = row["signature"].replace("|", "\\|")
        assert f"* {row['name']} ({signature}): {row['score']:.2f}\n" in text
    assert (
        "of checkpoint24.pt, checkpoint20.pt, " in text
        and "Licence of the weights: unknown." in text
    )
    assert (
        "`rskip` (lambda 2, alpha 1): " in text
        and "`y_k = G_k(x + y_{k-1})`" in text
        and "Eq. 4" in text
    )
    shown = settings(exported)
    assert (shown["optimization"]["lr"], shown["criterion"]["label_smoothing"]) == ([0.01], 0.1)
    assert "--gen-subset test --beam 4 --lenpen 0.5" in text and str(exported.parent) not in text


def test_of_a_folder_the_weights_and_scores_are_those_of_rskip_evaluate(
    translator, translated, exported, tmp_path, capsys
):
    """A run has its checkpoints in a folder below.

    The average is taken from the evaluation, or made.
    """
    expected = load_file(exported / "model.safetensors")
    for name in ("with", "without"):
        checkpoints = tmp_path / name / "checkpoints"
        shutil.copytree(translator[1], checkpoints)
        if name == "without":
            shutil.rmtree(checkpoints / "evaluation-test")
        out = tmp_path / f"{name}-out"
        assert export(tmp_path / name, out) == 0
        line = capsys.readouterr().out.splitlines()[0]
        assert line.startswith("average of the last 5 epoch checkpoints: checkpoint")
        weights = load_file(out / "model.safetensors")
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[each], value) for each, value in expected.items())
        assert ("Scores: none" in card(out)[1]) == (name == "without")


def test_a_folder_that_cannot_be_written_is_named(translator, tmp_path, capfd):
    line = refused(capfd, translator[1] / "checkpoint_best.pt", "/proc/model")
    assert line.startswith("cannot write into /proc: ")


def test_a_stock_transformer_translates_as_fairseq_generate(translator, tmp_path):
    """Of fairseq's own architecture, in half precision: exported as the same network of ours, in
    full.
    """
    data = translator[0] / "data-bin"
    words = (
        " ".join(TRAINING)
        .replace("transformer_rskip_ln_tiny", "transformer_tiny")
        .replace("24", "6")
        .split()
    )
    run_checked(["fairseq-train", data, *words, "--no-epoch-checkpoints", "--save-dir", tmp_path])
    last = tmp_path / "checkpoint_last.pt"
    state = load_checkpoint(last)
    state["model"] = {name: value.half() for name, value in state["model"].items()}
    torch.save(state, last)
    options = "--beam 4 --lenpen 0.5 --max-len-a 0 --max-len-b 30 --remove-bpe --cpu".split()
    log = run_checked(["fairseq-generate", data, "--path", last, *options])
    actual = {
        int(i[2:]): text
        for i, _, text in (r.split("\t") for r in log.splitlines() if r.startswith("H-"))
    }
    assert export(last, tmp_path / "out") == 0
    model = fairseq_rskip.from_pretrained(tmp_path / "out")
    sentences = (data / "raw" / "test.en").read_text("utf-8").splitlines()
    batches = model.generate(
        [model.encode(sentence) for sentence in sentences], beam=4, max_len_a=0, max_len_b=30
    )
    ours = [model.tgt_dict.string(hypotheses[0]["tokens"], "subword_nmt") for hypotheses in batches]
    assert ours == [actual[i] for i in range(len(sentences))]
    assert "`xskip` (lambda 1, " in card(tmp_path / "out")[1]


def test_the_networks_error_is_the_runs(classifier):
    run, folder = classifier
    result = json.loads((run / "result.json").read_text("utf-8"))
    model = fairseq_rskip.from_pretrained(folder)
    images = load(Config(data="digits"))
    names = model.classify(images.test_images)
    assert model.classify(images.test_images.numpy()) == names
    wrong = sum(
        name != images.classes[label] for name, label in zip(names, images.test_labels.tolist())
    )
    assert 100 * wrong / len(names) == result["error"] and 0 < result["error"] < 50
    assert not model.training and model.blocks[0].skip.options.skip_lambda == 3
    with pytest.raises(UserError, match=r"\(1, 16, 16, 3\): expected uint8 \(N, 32, 32, 3\)$"):
        model.classify(torch.zeros(1, 16, 16, 3, dtype=torch.uint8))
    assert torch.hub.load(str(ROOT), "resnet_rskip", str(folder), source="local").classes == tuple(
        "0123456789"
    )

    header, text = card(folder)
    assert header["pipeline_tag"] == "image-classification"
    assert (
        f"* test error: {result['error']:.2f} % of 359 test images, seed 1, 200 training images\n"
        in text
    )
    again = Config(**{**result["config"], "seeds": (1,), "milestones": (50,)})
    shown = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in settings(folder).items()
    }
    assert Config(**shown).fixed() == again.fixed()


# what is exported of the checkpoints' folder; options; what the line says
REFUSED = {
    "another task": (
        "other.pt",
        [],
        "is of the task translation_lev: expected translation or language_mod",
    ),
    "no corpus": (
        "checkpoint_best.pt",
        ["--data", "/nowhere"],
        "the folder /nowhere does not exist",
    ),
}


def test_what_cannot_be_exported_is_one_line(translator, classifier, tmp_path, capfd):
    folder, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(
        translator[1], folder, ignore=shutil.ignore_patterns("evaluation-*", "checkpoint?*[0-9].pt")
    )
    state = load_checkpoint(folder / "checkpoint_best.pt")
    state["cfg"]["task"]["_name"] = "translation_lev"
    torch.save(state, folder / "other.pt")
    for name, options, words in REFUSED.values():
        assert words in refused(capfd, folder / name, out, *options)
    run, result = tmp_path / "run", json.loads((classifier[0] / "result.json").read_text("utf-8"))
    run.mkdir()
    shutil.copy(classifier[0] / "checkpoint.pt", run)
    assert "that has not finished has no result.json (--resume)" in refused(capfd, run, out)
    (run / "result.json").write_text(json.dumps({**result, "iterations": 7}))
    assert "is the result of another run" in refused(capfd, run, out)
    assert "--data is for translation" in refused(capfd, classifier[0], out, "--data", "x")
    assert "exists and is not an empty folder" in refused(capfd, *classifier)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]


def edit(name, old, new):
    def change(folder):
        text = (folder / name).read_text("utf-8")
        assert old in text
        (folder / name).write_text(text.replace(old, new), "utf-8")

    return change


def device(folder):
    (folder / "dict.de.txt").unlink()
    (folder / "dict.de.txt").symlink_to("/dev/zero")


def with_nan(folder):
    weights = load_file(folder / "model.safetensors")
    weights["decoder.layers.0.fc1.weight"][2, 3] = float("nan")
    save_file(weights, folder / "model.safetensors")


def without_metadata(folder):
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")


SPOILT = {
    "NaN": (with_nan, "decoder.layers.0.fc1.weight holds NaN"),
    "no metadata": (without_metadata, "Missing key(s)"),  # which names the tensors that are shared
    "other weights": (
        edit("config.json", '_ffn_embed_dim": 64', '_ffn_embed_dim": 65'),
        "size mismatch for encoder.l",
    ),
    "very many layers": (
        edit("config.json", 'encoder_layers": 1', 'encoder_layers": 1000000000'),
        "1000000000 layers",
    ),
    "broken dictionary": (
        lambda f: (f / "dict.de.txt").write_text("a b c\n"),
        "dict.de.txt is not a dictionary",
    ),
    "dictionary that is a device": (device, "dict.de.txt is missing or not a file"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_folder_that_is_not_whole_is_one_line(exported, tmp_path, case):
    spoil, words = SPOILT[case]
    shutil.copytree(exported, tmp_path / "copy")
    spoil(tmp_path / "copy")
    with pytest.raises(UserError) as error:
        fairseq_rskip.from_pretrained(tmp_path / "copy")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_nothing_in_a_card_is_markup(classifier, tmp_path):
    """Names of corpora and classes come from folders of other people."""
    evil = "<script>alert(1) [x](y) `a`\n# b"
    result = json.loads((classifier[0] / "result.json").read_text("utf-8"))
    result["config"]["data"] = f"imagefolder:/x {evil}"
    (tmp_path / "result.json").write_text(json.dumps(result))
    shutil.copy(classifier[0] / "checkpoint.pt", tmp_path)
    assert export(tmp_path, tmp_path / "out", "--licence", "mit") == 0
    header, text = card(tmp_path / "out")
    assert header["license"] == "mit"
    assert "<script" not in text and "&lt;script" in text and "\\[x\\](y) \\`a\\` # b" in text


def test_a_card_names_a_folder_of_images_without_its_path(classifier, tmp_path):
    result = json.loads((classifier[0] / "result.json").read_text("utf-8"))
    shutil.copy(classifier[0] / "checkpoint.pt", tmp_path)
    for data in ("imagefolder:images", "imagefolder:/here/images"):
        result["config"]["data"] = data
        (tmp_path / "result.json").write_text(json.dumps(result))
        assert export(tmp_path, tmp_path / "out", "--licence", "mit") == 0
        text = card(tmp_path / "out")[1]
        assert ", imagefolder:images" in text and "/here" not in text
        shutil.rmtree(tmp_path / "out")


def test_a_card_has_the_span_of_a_number_that_differs_between_blocks():
    blocks = [create_skip("wskip", 4, init=weight) for weight in (1.0, 2.5, 1.5)]
    assert rule_line(blocks).startswith("* `wskip` (alpha 1, weight 1 to 2.5): Learned skip ")
    assert rule_line([create_skip("orthogonal", 4)]).startswith("* `orthogonal`: ")


def test_a_card_has_the_options_that_are_words():
    mhc = create_skip("mhc", 4, place=Place(), matrix="quaternions")
    assert ", matrix quaternions" in rule_line([mhc]).partition("):")[0]


def test_an_own_rule_goes_with_the_model_and_the_card_names_it(tmp_path, monkeypatch):
    rule = tmp_path / "my_rule.py"
    rule.write_text("# a rule\n")
    monkeypatch.setattr(own_rules, "file_of", lambda kind: rule)
    model = torch.nn.Sequential(create_skip("xskip", 4))
    folder = tmp_path / "export"
    folder.mkdir()
    copy_own_rules(folder, model)
    about = Card(header={}, title="A model", scores=[], example="model")
    write_card(folder / "README.md", about, model, "MIT")
    assert (folder / "my_rule.py").read_text() == "# a rule\n"
    assert 'os.environ["RSKIP_RULES"] = "DIR/my_rule.py"' in (folder / "README.md").read_text()
