"""rskip analyze: what it measures of MODELs equals a measurement by hand.

What is wrong with them gets one line.
"""

import csv
import math
import re
import shlex
import sys
from argparse import Namespace

import pytest
import torch
from conftest import run_checked, run_command
from fairseq import checkpoint_utils, options, tasks
from transformer_helpers import randomise
from vision_helpers import arguments, error_line, write_folder

from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.tools import analyze as command
from fairseq_rskip.tools import transformers
from fairseq_rskip.tools.source import Source
from fairseq_rskip.vision import main as training
from fairseq_rskip.vision.config import Config
from fairseq_rskip.vision.data import load
from fairseq_rskip.vision.model import PreActResNet

ANALYZE = ["-m", "fairseq_rskip.tools", "analyze"]
NAMES = ["gradients", "ratio", "streams", "reads", "depth", "curves", "course", "depth-check"]
FRESH = "fresh:--depth 8 --skip-kind rskip --skip-lambda 2"


def test_help_has_one_line_for_each_command_and_comes_without_torch(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = run_command([sys.executable, "-X", "importtime", *ANALYZE, "-h"])
    assert [
        line.split()[0] for line in done.stdout.splitlines() if re.match(r"    \w", line)
    ] == NAMES
    assert done.returncode == 0 and not re.search(r"\| +(torch|numpy)$", done.stderr, re.M)


def test_a_misspelt_command_gets_the_nearest(capsys):
    assert exit_status(lambda: command.run(["depthcheck"])) == 2
    message = error_line(capsys.readouterr().err)
    assert message.startswith("COMMAND: invalid choice: 'depthcheck'; did you mean depth-check? ")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of a trained ResNet-8 on twelve images, in folders whose names need quoting."""
    folder = tmp_path_factory.mktemp("Việt runs")
    data = f"imagefolder:{write_folder(folder / 'images')}"
    argv = arguments(
        folder / "run", data, seeds=[1, 2], skip_kind="xskip", skip_lambda=2, skip_norm="layer"
    )
    assert training.main(argv) == 0
    return folder, data


@pytest.fixture
def analyze(runs, tmp_path, capfd):
    """Run ``rskip analyze COMMAND ...`` in this process.

    Returns (exit status, stdout, stderr, rows of the CSV).
    """

    def run(name, *models, **options):
        options = {
            "data": runs[1],
            "cache": runs[0] / "cache",
            "device": "cpu",
            "output": tmp_path / "f g",
            **options,
        }
        flags = [
            word
            for option, value in options.items()
            for word in (f"--{option.replace('_', '-')}", str(value))
        ]
        capfd.readouterr()
        status = exit_status(lambda: command.run([name, *map(str, models), *flags]))
        table = tmp_path / "f g.csv"
        rows = list(csv.DictReader(table.open(encoding="utf-8"))) if table.is_file() else []
        return (status, *capfd.readouterr(), rows)

    return run


def refused(result):
    """The line of a command that refuses."""
    assert result[0] == 1 and not result[3]
    return error_line(result[2])


def test_gradients_of_checkpoints_and_fresh_networks(runs, analyze):
    seed1, seed2 = (runs[0] / "run" / f"seed{seed}" for seed in (1, 2))
    models = (seed1, seed2 / "checkpoint.pt", f"b={seed2}", f"new={FRESH}")
    status, out, _, rows = analyze("gradients", *models)
    assert status == 0
    assert [row["model"] for row in rows] == [
        label for label in ("seed1", "seed2", "b", "new") for _ in range(3)
    ]
    assert [row["group"] for row in rows[:3]] == ["stage1", "stage2", "stage3"]
    assert {row["examples"] for row in rows} == {"12"}
    assert all(math.isfinite(float(row["gradient_norm"])) for row in rows)
    assert "12 training images" in out and "stage2 block 2" in out

    state = torch.load(seed1 / "checkpoint.pt", weights_only=True)
    images = load(Config(data=runs[1], cache=str(runs[0] / "cache")))
    model = PreActResNet(8, 3, {"kind": "xskip", "skip_lambda": 2, "norm": "layer"}).eval()
    model.load_state_dict(state["model"])
    pixels = images.train_images.double().div(255).flatten(0, 2)
    mean, std = pixels.mean(0), pixels.std(0, correction=0)
    x = ((images.train_images.double() / 255 - mean) / std).float().permute(0, 3, 1, 2)
    norms = []
    for image, label in zip(x.split(1), images.train_labels.split(1)):
        h = model.blocks[:2](model.conv(image))
        h.retain_grad()
        logits = model.fc(torch.relu(model.bn(model.blocks[2](h))).mean((2, 3)))
        torch.nn.functional.cross_entropy(logits, label).backward()
        norms.append(h.grad.norm())
    assert float(rows[1]["gradient_norm"]) == pytest.approx(
        float(torch.stack(norms).mean()), rel=1e-4
    )


def test_ratio_learned_vectors_and_stage(runs, analyze, tmp_path):
    fresh = "w=fresh:--depth 8 --skip-kind wskip --skip-init 2 --skip-norm layer"
    status, out, _, rows = analyze(
        "ratio", f"2xSkip+LN={runs[0] / 'run' / 'seed1'}", fresh, stage=2, examples=6
    )
    assert status == 0 and [(row["model"], row["index"]) for row in rows] == [
        ("2xSkip+LN", "2"),
        ("w", "2"),
    ]
    for row in rows:
        assert float(row["ratio"]) == pytest.approx(2)
        assert float(row["effective_scale"]) == pytest.approx(2 * float(row["branch_coefficient"]))
        assert row["examples"] == "6"
    learned = list(csv.DictReader((tmp_path / "f g-learned.csv").open(encoding="utf-8")))
    state = torch.load(runs[0] / "run" / "seed1" / "checkpoint.pt", weights_only=True)["model"]
    gain = state["blocks.1.skip.post.0.weight"]
    assert [row["vector"] for row in learned] == ["gain of G_1", "gain of G_1", "w"]
    assert (
        float(learned[0]["norm"]) == pytest.approx(float(gain.norm()))
        and learned[0]["size"] == "32"
    )
    assert (
        float(learned[2]["norm"]) == pytest.approx(2 * 32**0.5)
        and float(learned[2]["mean_absolute"]) == 2
    )
    assert re.search(r"^the paper \(ResNet-110\) +2\.82", out, re.M)
    assert re.search(r"^ +w +2 +2 +2 ", out, re.M) and "adaptive" not in out


def test_ratio_takes_a_norm_without_gain(analyze, tmp_path):
    fresh = "a=fresh:--depth 8 --skip-kind xskip --skip-lambda 2 --skip-norm ada"
    status, _, _, rows = analyze("ratio", fresh, examples=2)
    assert status == 0 and [float(row["ratio"]) for row in rows] == [pytest.approx(2)] * 3
    assert not (tmp_path / "f g-learned.csv").exists()


def test_ratio_reports_an_adaptive_lambda_and_refuses_what_has_no_ratio(analyze):
    models = ("a=fresh:--depth 8 --skip-kind askip", f"r={FRESH}")
    status, out, _, rows = analyze("ratio", *models, examples=2)
    assert status == 0 and "adaptive λ, mean over 2 training images" in out
    assert [row["lambda"] for row in rows] == ["2.0"] * 3 + ["nan"] * 3
    message = error_line(analyze("ratio", "l=fresh:--depth 8 --skip-kind laurel", examples=2)[2])
    assert message.startswith(
        "l: blocks.0.skip has no x:F: its rule mixes features or carries several tensors"
    )


WRONG = (
    (
        ["fresh:--depth 8"],
        {},
        "MODEL 'fresh:--depth 8': expected LABEL=PATH, PATH or 'LABEL=fresh:...'",
    ),
    ([f"a={FRESH}", f"a={FRESH}"], {}, "two models have this label: say LABEL=PATH"),
    (
        ["a=fresh:--dpeth 8"],
        {},
        "a (fresh:--dpeth 8): unrecognized argument --dpeth; did you mean --depth?",
    ),
    (["a=fresh:--depth 8 -h"], {}, "expected options that change the model, not -h"),
    ([f"a={FRESH}", "b=fresh:transformer_rskip_ln_tiny"], {}, "they share no examples"),
    (["a=fresh:transformer_rskip_ln_tiny"], {"data": ""}, "fresh Transformers need --data"),
    (["a=fresh:transformer_rskip_ln_tiny"], {"stage": 2}, "--stage: expected with ResNets only"),
)


def test_what_is_wrong_on_the_command_line_gets_one_line(analyze):
    for models, more, line in WRONG:
        assert line in refused(analyze("gradients", *models, **more)), line


def test_what_is_wrong_with_a_checkpoint_names_it_and_the_layer(runs, analyze, tmp_path):
    def spoilt(change):
        """A copy of seed 1's checkpoint after ``change(its model's weights)``."""
        state = torch.load(runs[0] / "run" / "seed1" / "checkpoint.pt", weights_only=True)
        change(state["model"])
        torch.save(state, tmp_path / "spoilt.pt")
        return f"bad={tmp_path / 'spoilt.pt'}"

    gain = "blocks.1.skip.post.0.weight"
    cases = (
        (lambda w: w.pop(gain), f'Missing key(s) in state_dict: "{gain}"'),
        (lambda w: w.update({gain: torch.ones(3)}), f"size mismatch for {gain}"),
        (lambda w: w[gain].fill_(math.nan), f"has values in {gain} that are not finite"),
        (lambda w: w.update({"fc.bias": torch.ones(7)}), "size mismatch for fc.bias"),
    )
    for change, line in cases:
        message = refused(analyze("ratio", spoilt(change)))
        assert line in message and "spoilt.pt" in message
    torch.save({"model": 1}, tmp_path / "noise.pt")
    assert "no checkpoint of train_cifar.py or fairseq-train" in refused(
        analyze("ratio", f"b={tmp_path / 'noise.pt'}")
    )
    assert f"folder of seeds: expected one of {runs[0] / 'run' / 'seed1'}" in refused(
        analyze("ratio", runs[0] / "run")
    )


def test_a_run_of_rskip_run_is_drawn_by_its_checkpoints_folders(tmp_path):
    for seed in ("seed1", "seed2"):
        (tmp_path / "run" / seed / "checkpoints").mkdir(parents=True)
    run = tmp_path / "run"
    first, second = f"{run}/seed1/checkpoints", f"{run}/seed2/checkpoints"
    assert command._trainings([f"a={run}"]) == [f"a={first}", f"a={second}"]
    assert command._trainings([f"{run}/seed2"]) == [f"seed2={second}"]
    assert command._trainings([f"a={first}"]) == [f"a={first}"]


@pytest.fixture(scope="module")
def trained(tiny_corpus, tmp_path_factory):
    """A checkpoint of ours after two updates."""
    folder = tmp_path_factory.mktemp("trained")
    plugin = run_checked(["python", "-m", "fairseq_rskip"]).strip()
    words = (
        "--optimizer adam --lr 0.001 --max-tokens 600 --max-update 2 --no-progress-bar --cpu "
        "--disable-validation"
    )
    argv = [
        "--arch",
        "transformer_rskip_ln_tiny",
        *shlex.split(words),
        "--user-dir",
        plugin,
        "--save-dir",
        folder,
    ]
    run_checked(["fairseq-train", tiny_corpus, *argv])
    return folder / "checkpoint_last.pt"


@pytest.mark.slow
def test_checkpoints_of_fairseq(trained, tiny_corpus, analyze):
    """The data is that which the checkpoint names.

    Fresh models stand beside it; a folder is its best checkpoint.
    """
    status, out, err, rows = analyze(
        "ratio", f"ours={trained.parent}", data="", examples=30, batch_size=7
    )
    assert status == 0 and f"checkpoint {trained}" in out, err
    assert [row["group"] for row in rows] == ["encoder"] * 4 + ["decoder"] * 6
    assert {row["examples"] for row in rows} == {"30"}
    fresh = "3r=fresh:transformer_rskip_ln_tiny --skip-lambda 3 --encoder-layers 1"
    status, out, err, rows = analyze(
        "gradients", f"ours={trained}", fresh, data=tiny_corpus, split="valid", examples=9
    )
    assert status == 0, err
    assert len(rows) == 10 + 8 and all(float(row["gradient_norm"]) > 0 for row in rows)


@pytest.mark.slow
def test_what_is_wrong_with_a_transformer_gets_one_line(trained, tiny_corpus, analyze):
    assert "--split tset: " in refused(analyze("gradients", f"o={trained}", data="", split="tset"))
    near = ": no architecture named 'transformer_rksip_ln'; did you mean transformer_rskip_ln?"
    for fresh, end in (
        ("transformer_rksip_ln", near),
        ("transformer_rskip_ln_tiny --skip-lambda 1.5", ""),
    ):
        assert f"n (fresh:{fresh}){end}" in refused(
            analyze("gradients", f"n=fresh:{fresh}", data=tiny_corpus)
        )


def last_gradient(model, samples):
    """Return the mean of the norms of the loss gradient at the output of the last decoder layer.

    The norms are taken sample by sample.
    """
    norms, seen = [], []
    model.decoder.layers[-1].register_forward_hook(
        lambda _module, _args, output: seen.append(output[0])
    )
    for sample in samples:
        loss = torch.nn.functional.cross_entropy(
            model(**sample["net_input"])[0][0], sample["target"][0]
        )
        norms.append(torch.autograd.grad(loss, seen[-1])[0].norm())
    return pytest.approx(float(torch.stack(norms).mean()), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
def test_stock_checkpoints_are_measured_as_the_same_network_of_ours(
    trained, tiny_corpus, analyze, tmp_path, pre_norm
):
    argv = [str(tiny_corpus), "--arch", "transformer_tiny"]
    argv += ["--encoder-normalize-before", "--decoder-normalize-before"] if pre_norm else []
    state = torch.load(trained, weights_only=False)
    state["cfg"]["model"] = options.parse_args_and_arch(options.get_training_parser(), argv)
    torch.save(state, tmp_path / "stock.pt")
    cfg = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "stock.pt"))["cfg"]
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    randomise(model)
    weights = model.state_dict()
    weights["decoder.embed_positions._float_tensor"].fill_(
        math.nan
    )  # which fairseq leaves uninitialised
    torch.save({**state, "model": weights}, tmp_path / "stock.pt")
    status, _, err, rows = analyze(
        "gradients", f"s={tmp_path / 'stock.pt'}", data="", split="valid", examples=9
    )
    assert status == 0, err
    model.train()
    # as after training: fairseq's fused path is for models that never were in training
    model.eval()
    task.load_dataset("valid")
    data = task.dataset("valid")
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))[:9].tolist()
    assert rows[-1]["block"] == "decoder.layers.1.final_skip"
    assert float(rows[-1]["gradient_norm"]) == last_gradient(
        model, [data.collater([data[n]]) for n in chosen]
    )


def measured(models, **changes):
    """What ``rskip analyze`` measures of Transformers."""
    options = {"device": "cpu", "data": None, "seed": 3, "split": "valid", "examples": 40}
    return transformers.study(models, Namespace(**{**options, "batch_size": 8, **changes}))


def test_fresh_transformers_are_those_of_the_seed(tiny_corpus):
    source = Source("new", fresh=("transformer_rskip_ln_tiny", "--encoder-layers", "1"))
    weights = []
    for seed in (3, 3, 4):
        study = measured([source], data=tiny_corpus, seed=seed)
        assert study.seeds == {"new": seed}
        weights.append(study.models["new"].encoder.layers[0].fc1.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_examples_fit_the_model_that_takes_the_shortest(tiny_corpus):
    sizes = {"long": 1024, "short": 5}
    models = []
    for label, size in sizes.items():
        limits = (f"--max-source-positions={size}", f"--max-target-positions={size}")
        models.append(Source(label, fresh=("transformer_rskip_ln_tiny", *limits)))
    study = measured(models, data=tiny_corpus)
    lengths = {batch["net_input"]["src_tokens"].shape[1] for batch in study.batches()}
    assert max(lengths) == 5


@pytest.mark.slow
def test_a_checkpoint_has_the_seed_of_its_training(language_model):
    data, folder = language_model
    source = Source("ours", str(folder / "checkpoint_best.pt"))
    assert measured([source], data=data, examples=2).seeds == {"ours": 3}


@pytest.mark.slow
@pytest.mark.parametrize("longer", [False, True], ids=["equal", "longer"])
def test_language_models_are_measured_window_by_window(language_model, tmp_path, capfd, longer):
    """The windows are the checkpoint's, also after a fresh model that takes longer ones."""
    data, folder = language_model
    models = [f"ours={folder / 'checkpoint_best.pt'}"]
    if longer:
        models.insert(0, "fresh=fresh:transformer_lm_preln_tiny")
    else:
        models.append("fresh=fresh:transformer_lm_preln_tiny --tokens-per-sample 32")
    command.run(["gradients", *models, "--split", "test", "--output", str(tmp_path / "gradients")])
    assert "13 windows of test" in capfd.readouterr().out
    rows = list(csv.DictReader((tmp_path / "gradients.csv").open(encoding="utf-8")))
    assert [row["group"] for row in rows] == ["decoder"] * 8 and {
        row["examples"] for row in rows
    } == {"13"}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(folder / "checkpoint_best.pt")], {"data": str(data)}
    )
    task.load_dataset("test")
    samples = [
        task.dataset("test").collater([task.dataset("test")[number]]) for number in range(13)
    ]
    of_ours = [row for row in rows if row["model"] == "ours"]
    assert float(of_ours[3]["gradient_norm"]) == last_gradient(model.eval(), samples)


@pytest.mark.slow
def test_a_language_model_does_not_read_pairs(language_model, tiny_corpus, tmp_path):
    _, folder = language_model
    words = [f"ours={folder / 'checkpoint_best.pt'}", "--output", str(tmp_path / "gradients")]
    with pytest.raises(UserError, match="ours .* is a language model, and .* has sentence pairs"):
        command.run(["gradients", *words, "--data", str(tiny_corpus)])
    with pytest.raises(UserError, match="--split training: .* has no such part"):
        command.run(["gradients", *words, "--split", "training"])


@pytest.mark.parametrize("stem", ["", "figures/"])
def test_a_stem_without_a_name_is_refused(stem):
    with pytest.raises(UserError, match=rf"--output '{stem}': .* such as {stem}gradients"):
        command.run(["gradients", "run", "--output", stem])


def test_figure_3_is_of_ten_thousand_training_examples_as_in_the_paper():
    options = command.parse(["gradients", "run"])
    assert (options.examples, options.split, options.seed) == (10_000, "train", 1)


def test_the_stacks_of_the_table_of_depth_are_the_default():
    options = command.parse(["depth"])
    sizes = {"blocks": 50, "dim": 64, "gain": 0.25, "examples": 32, "seeds": 5, "tokens": 16}
    assert {name: getattr(options, name) for name in sizes} == sizes


@pytest.mark.parametrize("name", ["gradients", "depth-check"])
def test_without_output_the_files_are_called_after_the_command(name):
    assert command.parse([name, "run"]).output == f"figures/{name}"
