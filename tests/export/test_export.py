"""rskip export and from_pretrained: the same text and the same error as before, from the folder alone; the card."""

import io
import json
import re
import shutil
import sys

import pytest
import torch
import yaml
from conftest import ROOT, run_checked
from evaluation_corpus import TRAINING
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from vision_helpers import error_line, train

import fairseq_rskip
from fairseq_rskip.errors import UserError
from fairseq_rskip.safe_load import load_checkpoint
from fairseq_rskip.tools.__main__ import main as rskip
from fairseq_rskip.vision.config import Config
from fairseq_rskip.vision.data import load

pytestmark = pytest.mark.slow
PLUGIN = ["--user-dir", ROOT / "fairseq_rskip"]
HUB = """
import sys, torch
repository, entry, folder, sentences = sys.argv[1:]
model = torch.hub.load(repository, entry, folder, source="local")
print("\\n".join(model.translate(open(sentences, encoding="utf-8").read().splitlines())))
"""


def export(*words):
    return rskip(["export", *map(str, words)])


def card(folder):
    """The header as data, and the text below it."""
    _, header, text = (folder / "README.md").read_text("utf-8").split("---\n", 2)
    return yaml.safe_load(header), text


def settings(text):
    """The settings of the training that a card shows."""
    return json.loads(text.split("```json\n")[1].split("```")[0])


@pytest.fixture(scope="module")
def exported(translator, translated, tmp_path_factory):
    """The averaged weights that evaluate.sh translated with, exported from copies that are gone."""
    base = tmp_path_factory.mktemp("geteilt")
    shutil.copytree(translator[0], base / "data")
    shutil.copytree(translator[1], base / "model")
    folder = base / "ein Modell"
    assert export(base / "model" / "evaluation-test" / "averaged.pt", folder, "--data", base / "data") == 0
    for name in ("data", "model"):
        shutil.rmtree(base / name)
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """The folder of a seed of digits, trained for seconds, and its export."""
    base = tmp_path_factory.mktemp("số")
    options = {"iterations": 60, "batch_size": 40, "milestones": [50], "train_images": 200, "test_interval": 99}
    train(None, base / "run", "digits", skip_lambda=3, width=12, **options)
    assert export(base / "run" / "seed1", base / "shared") == 0
    return base / "run" / "seed1", base / "shared"


def test_the_text_is_that_of_evaluate_from_the_folder_alone(translator, translated, exported, tmp_path):
    """In this process, and by torch.hub in another that finds the repository by its path only."""
    raw = translator[0] / "data-bin" / "raw" / "test.en"
    expected = (translated[1] / "hyp.txt").read_text("utf-8").splitlines()
    sentences = raw.read_text("utf-8").splitlines()
    model = fairseq_rskip.from_pretrained(exported)
    assert model.translate(sentences) == expected
    assert model.translate(sentences[3]) == expected[3]
    assert [
        model.decode(hypotheses[0]["tokens"])
        for hypotheses in model.generate([model.encode(sentence) for sentence in sentences[:5]], beam=4)
    ] == expected[:5]
    command = [sys.executable, "-c", HUB, ROOT, "transformer_rskip", exported, raw]
    assert run_checked(command, cwd=tmp_path, env={"PYTHONPATH": ""}).splitlines()[-len(expected) :] == expected


def test_translate_reads_and_writes_lines(translator, translated, exported, monkeypatch, capsys):
    """From the export and from the folder of checkpoints, whose last five are averaged; empty lines stay empty."""
    sentences = (translator[0] / "data-bin" / "raw" / "test.en").read_text("utf-8").splitlines()[:5]
    expected = (translated[1] / "hyp.txt").read_text("utf-8").splitlines()[:5]
    for model in (exported, translator[1]):
        text = "\n".join(["", *sentences[:3], " ", *sentences[3:]])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert rskip(["translate", str(model), "--lines", "3", "--cpu"]) == 0
        assert capsys.readouterr().out.splitlines() == ["", *expected[:3], "", *expected[3:]]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"gut\nsch\xf6n\n")))
    assert rskip(["translate", str(exported)]) == 1
    assert "lines 1 to 2 of standard input are not UTF-8" in error_line(capsys.readouterr().err)


def test_options_of_the_search_are_fairseqs(exported):
    model = fairseq_rskip.from_pretrained(exported)
    short = model.translate("It's a red house, isn't it?", beam=2, max_len_a=0, max_len_b=3)
    assert short != model.translate("It's a red house, isn't it?")
    with pytest.raises(UserError, match="no option beams of its search"):
        model.translate("It's a red house.", beams=3)
    with pytest.raises(UserError, match="^'a a a .* has 1101 tokens, the model takes 1024$"):
        model.translate(["a", "a " * 1100])


def test_the_card_of_a_translator(translated, exported):
    header, text = card(exported)
    scores = json.loads((translated[1] / "scores.json").read_text("utf-8"))
    assert header["language"] == ["en", "de"] and header["pipeline_tag"] == "translation"
    (result,) = header["model-index"][0]["results"]
    for row, metric in zip(scores["scores"], result["metrics"]):
        assert metric["value"] == pytest.approx(row["score"], abs=1e-4) and row["signature"] in metric["name"]
        signature = row["signature"].replace("|", "\\|")
        assert f"* {row['name']} ({signature}): {row['score']:.2f}\n" in text
    assert {metric["type"] for metric in result["metrics"]} == {"bleu", "chrf"}
    assert "average of checkpoint24.pt, checkpoint20.pt, " in text and "Licence of the weights: unknown." in text
    rows = re.findall(r"^(\w+ 0 \w+) +rskip λ=2 α=1 +after layer +256  ", text, re.M)  # two norms of 64 features each
    expected = "encoder 0 self_attn, encoder 0 ffn, decoder 0 self_attn, decoder 0 encoder_attn, decoder 0 ffn"
    assert ", ".join(rows) == expected
    assert "`y_k = G_k(x + y_{k-1})`" in text and "Eq. 4" in text
    shown = settings(text)
    assert (shown["optimization"]["lr"], shown["criterion"]["label_smoothing"]) == ([0.01], 0.1)
    assert "--gen-subset test --beam 4 --lenpen 0.5" in shown["evaluation"]
    assert f"fairseq_rskip {fairseq_rskip.__version__}, commit " in text
    assert str(exported.parent) not in text


def test_scores_are_those_of_the_same_weights_or_of_the_folder_that_is_named(translator, translated, tmp_path, capsys):
    best = translator[1] / "checkpoint_best.pt"
    for options, scored in (([], False), (["--evaluation", translated[1]], True)):
        assert export(best, tmp_path / str(scored), *options) == 0
        assert ("model-index" in card(tmp_path / str(scored))[0]) == scored
        assert ("no scores found: --evaluation FOLDER names them" in capsys.readouterr().out) == (not scored)


def test_a_stock_transformer_translates_as_fairseq_generate(translator, tmp_path):
    """Of fairseq's own architecture, in half precision: exported as the same network of ours, in full."""
    data = translator[0] / "data-bin"
    words = " ".join(TRAINING).replace("transformer_rskip_ln_tiny", "transformer_tiny").replace("24", "6").split()
    run_checked(["fairseq-train", data, *words, "--save-dir", tmp_path])
    last = tmp_path / "checkpoint_last.pt"
    state = load_checkpoint(last)
    state["model"] = {name: value.half() for name, value in state["model"].items()}
    torch.save(state, last)
    options = "--beam 4 --lenpen 0.5 --max-len-a 0 --max-len-b 30 --remove-bpe --cpu".split()
    log = run_checked(["fairseq-generate", data, "--path", last, *options])
    found = {int(i[2:]): text for i, _, text in (r.split("\t") for r in log.splitlines() if r.startswith("H-"))}
    assert export(last, tmp_path / "out") == 0
    model = fairseq_rskip.from_pretrained(tmp_path / "out")
    sentences = (data / "raw" / "test.en").read_text("utf-8").splitlines()
    batches = model.generate([model.encode(sentence) for sentence in sentences], beam=4, max_len_a=0, max_len_b=30)
    ours = [model.tgt_dict.string(hypotheses[0]["tokens"], "subword_nmt") for hypotheses in batches]
    assert ours == [found[i] for i in range(len(sentences))]
    assert card(tmp_path / "out")[1].count(" xskip λ=1 ") == 5


def test_the_networks_error_is_the_runs(classifier):
    run, folder = classifier
    result = json.loads((run / "result.json").read_text("utf-8"))
    model = fairseq_rskip.from_pretrained(folder)
    images = load(Config(data="digits"))
    names = model.classify(images.test_images)
    wrong = sum(name != images.classes[label] for name, label in zip(names, images.test_labels.tolist()))
    assert 100 * wrong / len(names) == result["error"] and 0 < result["error"] < 80
    assert not model.training and model.blocks[0].skip.options.skip_lambda == 3
    with pytest.raises(UserError, match=r"images of torch.float32 \(1, 32, 32, 3\): expected uint8"):
        model.preprocess(torch.zeros(1, 32, 32, 3))
    with pytest.raises(UserError, match=r"\(1, 16, 16, 3\): expected uint8 \(N, 32, 32, 3\)$"):
        model.classify(torch.zeros(1, 16, 16, 3, dtype=torch.uint8))


def test_the_card_of_a_classifier_and_its_entry(classifier):
    run, folder = classifier
    result = json.loads((run / "result.json").read_text("utf-8"))
    header, text = card(folder)
    (metric,) = header["model-index"][0]["results"][0]["metrics"]
    assert (header["pipeline_tag"], metric["value"]) == ("image-classification", round(result["error"], 4))
    assert f"{result['error']:.2f} % of 359 test images after the last of 60 iterations, seed 1 (200 training" in text
    assert f"{result['parameters']:,} parameters" in text and " rskip λ=3 " in text
    again = Config(**{**result["config"], "seeds": (1,), "milestones": (50,)})
    shown = {key: tuple(value) if isinstance(value, list) else value for key, value in settings(text).items()}
    assert Config(**shown).fixed() == again.fixed()
    assert torch.hub.load(str(ROOT), "resnet_rskip", str(folder), source="local").classes == tuple("0123456789")


def of_another_task(folder):
    state = load_checkpoint(folder / "checkpoint_best.pt")
    state["cfg"]["task"]["_name"] = "translation_lev"
    torch.save(state, folder / "other.pt")
    return folder / "other.pt"


# what is exported, made in a copy of the checkpoints' folder; options; what the line says
REFUSED = {
    "an empty folder": (lambda m: (m / "new").mkdir() or m / "new", [], ["new has no checkpoint: it holds nothing"]),
    "another task": (of_another_task, [], ["is of the task translation_lev: expected translation or language_mod"]),
    "no corpus": (lambda m: m / "checkpoint_best.pt", ["--data", "/nowhere"], ["no corpus or folder named '/nowhere'"]),
    "no evaluation": (lambda m: m / "checkpoint_best.pt", ["--evaluation", "/x"], ["/x/scores.json", "rskip evaluate"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_is_one_line(translator, tmp_path, capfd, case):
    make, options, words = REFUSED[case]
    shutil.copytree(translator[1], tmp_path / "model", ignore=shutil.ignore_patterns("evaluation-*"))
    checkpoint = make(tmp_path / "model")
    capfd.readouterr()
    assert export(checkpoint, tmp_path / "out", *options) == 1
    line = error_line(capfd.readouterr().err)
    assert all(word in line for word in words), line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_of_a_folder_it_is_the_best_checkpoint(translator, tmp_path):
    """Also of the folder of a run, which has its checkpoints in a folder below."""
    shutil.copytree(translator[1], tmp_path / "run" / "checkpoints", ignore=shutil.ignore_patterns("evaluation-*"))
    made = {"file": translator[1] / "checkpoint_best.pt", "folder": translator[1], "run": tmp_path / "run"}
    for name, source in made.items():
        assert export(source, tmp_path / name / "out") == 0
    file, folder, run = (load_file(tmp_path / name / "out" / "model.safetensors") for name in made)
    for name, tensor in file.items():
        assert torch.equal(tensor, folder[name]) and torch.equal(tensor, run[name])


def test_what_is_missing_or_in_the_way_is_one_line(classifier, tmp_path, capfd):
    run, folder = classifier
    (tmp_path / "run").mkdir()
    shutil.copy(run / "checkpoint.pt", tmp_path / "run")

    def refused(checkpoint, target, *options):
        capfd.readouterr()
        assert export(checkpoint, target, *options) == 1
        return error_line(capfd.readouterr().err)

    assert "has no result.json beside it: finish the training" in refused(tmp_path / "run", tmp_path / "out")
    result = json.loads((run / "result.json").read_text("utf-8"))
    (tmp_path / "run" / "result.json").write_text(json.dumps({**result, "iterations": 7}))
    assert "is the result of another run" in refused(tmp_path / "run", tmp_path / "out")
    assert "exists and is not an empty folder" in refused(run, folder)
    assert "--data is for translation" in refused(run, tmp_path / "out", "--data", "x")
    assert not (tmp_path / "out").exists()


def edit(name, old, new):
    def change(folder):
        text = (folder / name).read_text("utf-8")
        assert old in text
        (folder / name).write_text(text.replace(old, new), "utf-8")

    return change


def link(name, target):
    def change(folder):
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return change


def with_weights(change, metadata=True):
    """Changes the stored tensors."""

    def write(folder):
        path = folder / "model.safetensors"
        with safe_open(path, "pt") as file:
            about = file.metadata() if metadata else None
        save_file(change(load_file(path)), path, about)

    return write


def with_nan(weights):
    weights["decoder.layers.0.fc1.weight"][2, 3] = float("nan")
    return weights


SPOILT = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "is not an exported model: model.safetensors is miss"),
    "NaN": (with_weights(with_nan), "decoder.layers.0.fc1.weight holds NaN"),
    "no metadata": (with_weights(dict, metadata=False), "Missing key(s)"),  # which names the tensors that are shared
    "other weights": (edit("config.json", '_ffn_embed_dim": 64', '_ffn_embed_dim": 65'), "size mismatch for encoder.l"),
    "very many layers": (edit("config.json", 'encoder_layers": 1', 'encoder_layers": 1000000000'), "1000000000 layers"),
    "no json": (edit("config.json", "{", "<"), "cannot read "),
    "other format": (edit("config.json", "export 1", "export 9"), "it says 'fairseq_rskip.export 9'"),
    "an unknown setting": (edit("config.json", '"skip_kind"', '"skip_sort"'), "or a file beside it is broken"),
    "broken dictionary": (lambda f: (f / "dict.de.txt").write_text("a b c\n"), "dict.de.txt is not a dictionary"),
    "dictionary that is a device": (link("dict.de.txt", "/dev/zero"), "dict.de.txt is missing or not a file"),
    "broken subwords": (lambda f: (f / "subwords.model").write_text("a b c\n"), "a file beside it is broken"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_folder_that_is_not_whole_is_one_line(exported, tmp_path, case):
    spoil, words = SPOILT[case]
    shutil.copytree(exported, tmp_path / "copy")
    spoil(tmp_path / "copy")
    with pytest.raises(UserError) as error:
        fairseq_rskip.from_pretrained(tmp_path / "copy")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_dictionary_may_be_a_link(exported, tmp_path):
    """A download cache keeps files once and links to them."""
    shutil.copytree(exported, tmp_path / "copy")
    link("dict.de.txt", exported / "dict.de.txt")(tmp_path / "copy")
    assert fairseq_rskip.from_pretrained(tmp_path / "copy").languages == ("en", "de")


def test_a_package_that_is_missing_is_named(exported, monkeypatch):
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(UserError, match="needs the Python package sacremoses: pip install sacremoses$"):
        fairseq_rskip.from_pretrained(exported)


def test_nothing_in_a_card_is_markup(classifier, tmp_path):
    """Names of corpora and classes come from folders of other people."""
    evil = "<script>alert(1) [x](y) `a`\n# b"
    state = load_checkpoint(classifier[0] / "checkpoint.pt")
    result = json.loads((classifier[0] / "result.json").read_text("utf-8"))
    result["config"]["data"] = f"imagefolder:/x {evil}"
    (tmp_path / "result.json").write_text(json.dumps(result))
    torch.save(state, tmp_path / "checkpoint.pt")
    assert export(tmp_path, tmp_path / "out", "--licence", "mit") == 0
    header, text = card(tmp_path / "out")
    assert header["license"] == "mit"
    prose = text.split("```json")[0]
    assert "<script" not in prose and "&lt;script" in prose and "\\[x\\](y) \\`a\\` # b" in prose
