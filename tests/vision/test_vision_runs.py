"""Training runs: log, result, seeds, resuming, and one step written out."""

import json
import math
import os
import shutil
import signal

import pytest
import torch
from vision_helpers import arguments, assert_same_run, history, refused, stop_at, train, weights

from fairseq_rskip.files import locked
from fairseq_rskip.vision import seeds
from fairseq_rskip.vision import trainer as trainer_module
from fairseq_rskip.vision.config import Config
from fairseq_rskip.vision.data import load
from fairseq_rskip.vision.main import main
from fairseq_rskip.vision.trainer import Group, Trainer


def test_a_run_logs_every_epoch_and_reports_the_last_iterations_error(tmp_path, images, capfd):
    options = {
        "iterations": 7,
        "tensorboard": True,
        "valid_images": 3,
        "batch_size": 6,
        "log_interval": 2,
    }
    status, out, error = train(capfd, tmp_path / "run", images, **options)
    assert (status, error) == (0, "")
    folder = tmp_path / "run" / "seed1"
    records = history(folder)
    epochs = [r for r in records if "epoch" in r]
    # 9 images, 6 a batch
    assert [(r["epoch"], r["iteration"]) for r in epochs] == [
        (1, 2),
        (2, 3),
        (3, 5),
        (4, 6),
        (5, 7),
    ]
    assert [r["lr"] for r in epochs] == [0.1, 0.1, 0.01, 0.001, 0.001]
    (within,) = [r for r in records if "epoch" not in r]
    assert within.keys() == {"iteration", "lr", "train_loss_so_far"} and within["iteration"] == 4
    result = json.loads((folder / "result.json").read_text("utf-8"))
    assert (
        result["error"] == epochs[-1]["test_error"]
        and result["valid_error"] == epochs[-1]["valid_error"]
    )
    assert result["best_error"] == min(r["test_error"] for r in epochs) == epochs[-1]["best_error"]
    assert (result["config"]["depth"], result["train_images"]) == (8, 9)
    assert result["versions"]["torch"] == torch.__version__
    assert result["images_per_second"] > 0 and result["parameters"] == 75_738 - 7 * 65
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    assert sum(line.startswith("epoch ") for line in out.splitlines()) == 5
    assert f"seed 1: error {result['error']:.2f} %" in out and "validation error" in out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["valid_errors"] == [
        result["valid_error"]
    ]


def test_a_short_run_shortens_the_warm_up_and_says_so(tmp_path, images, capfd):
    line = "warm-up: 0 updates; the paper's: 400 of 64000"
    argv = arguments(tmp_path / "run", images)
    at = argv.index("--warmup-iterations")
    del argv[at : at + 2]
    assert main(argv) == 0 and line in capfd.readouterr().out


def test_the_cost_of_halting_is_not_in_the_training_loss(tmp_path, images):
    halting = {
        "skip_kind": "askip",
        "skip_adapt": "halting",
        "iterations": 1,
        "warmup_iterations": 0,
    }
    for cost in (0.0, 0.5):
        assert train(None, tmp_path / str(cost), images, skip_halt_cost=cost, **halting)[0] == 0
    without, with_cost = (
        history(tmp_path / str(cost) / "seed1")[-1]["train_loss"] for cost in (0.0, 0.5)
    )
    assert without == with_cost


def test_a_profile_is_of_the_first_batch_of_the_training(tmp_path, images, monkeypatch):
    """Not of the first images of the folder, which are of one class."""
    cross_entropy, profiled = trainer_module.F.cross_entropy, []

    def keep_labels(logits, labels, **options):
        profiled.append(labels)
        return cross_entropy(logits, labels, **options)

    monkeypatch.setattr(trainer_module.F, "cross_entropy", keep_labels)
    rule = {"skip_kind": "admin", "skip_norm": "layer"}
    config = Config(data=images, cache=str(tmp_path), depth=8, batch_size=6, **rule)
    data = load(config)
    trainer = Trainer(config, 1, data, Group(0, 1, torch.device("cpu")))  # it profiles
    (labels,) = profiled
    assert torch.equal(labels, data.train_labels[trainer.stream.next().index])


def test_the_best_epoch_is_that_of_the_lowest_error(tmp_path, images, monkeypatch):
    errors = iter([50.0, 30.0, 40.0])
    monkeypatch.setattr(Trainer, "test", lambda self: {"test_error": next(errors), "test_loss": 1})
    options = {"iterations": 6, "batch_size": 6}  # three epochs of twelve images
    assert train(None, tmp_path / "run", images, **options)[0] == 0
    result = json.loads((tmp_path / "run" / "seed1" / "result.json").read_text("utf-8"))
    assert (result["error"], result["best_error"], result["best_epoch"]) == (40, 30, 2)


def test_askip_goes_on_from_an_rskips_checkpoint(tmp_path, images, capfd):
    rskip = {"skip_kind": "rskip", "skip_lambda": 3, "warmup_iterations": 0}
    assert train(capfd, tmp_path / "rskip", images, iterations=2, **rskip)[0] == 0
    checkpoint = tmp_path / "rskip" / "seed1" / "checkpoint.pt"
    start = {"iterations": 2, "lr": 1e-9, "warmup_iterations": 0, "finetune_from": checkpoint}
    assert train(capfd, tmp_path / "askip", images, skip_kind="askip", **start)[::2] == (0, "")
    result = json.loads((tmp_path / "askip" / "seed1" / "result.json").read_text("utf-8"))
    assert list(result["lambda"].values()) == pytest.approx([3.0] * 3)
    before, after = (weights(tmp_path / name / "seed1") for name in ("rskip", "askip"))
    assert all(
        torch.allclose(after[name], value) for name, value in before.items() if "weight" in name
    )
    status, _, error = train(
        capfd, tmp_path / "xskip", images, skip_kind="xskip", skip_lambda=3, **start
    )
    assert status == 1 and error.count("\n") == 1
    assert error.startswith(f"error: {checkpoint} is damaged, or does not fit this network: ")
    shutil.copy(tmp_path / "askip" / "seed1" / "checkpoint.pt", checkpoint)  # another parent
    line = refused(train(capfd, tmp_path / "askip", images, skip_kind="askip", seeds=[2], **start))
    assert "seed1/result.json is of another run: SHA-256 of --finetune-from: " in line
    checkpoint.unlink()  # a finished training does not need it
    assert train(capfd, tmp_path / "askip", images, skip_kind="askip", **start)[::2] == (0, "")
    line = refused(train(capfd, tmp_path / "none", images, skip_kind="askip", **start))
    assert line == f"checkpoint {checkpoint} does not exist"


def test_a_run_that_goes_on_without_its_parent_remembers_it(tmp_path, images, capfd, monkeypatch):
    start = {"warmup_iterations": 0, "finetune_from": tmp_path / "parent.pt"}
    for name in ("first", "other"):
        seed = ["first", "other"].index(name) + 1
        assert train(capfd, tmp_path / name, images, seeds=[seed], warmup_iterations=0)[0] == 0
    shutil.copy(tmp_path / "first" / "seed1" / "checkpoint.pt", start["finetune_from"])
    with stop_at(monkeypatch, 2):
        assert train(capfd, tmp_path / "run", images, save_interval=1, **start)[0] == 130
    start["finetune_from"].unlink()
    again = {"save_interval": 1, "resume": True, **start}
    assert train(capfd, tmp_path / "run", images, **again)[0] == 0
    shutil.copy(tmp_path / "other" / "seed2" / "checkpoint.pt", start["finetune_from"])
    line = refused(train(capfd, tmp_path / "run", images, seeds=[2], save_interval=1, **start))
    assert "seed1/result.json is of another run: SHA-256 of --finetune-from: " in line


def test_a_coefficient_that_keeps_its_parents_value_never_moved(tmp_path, images, capfd):
    settings = {"skip_kind": "layerscale", "warmup_iterations": 0, "iterations": 2}
    assert train(capfd, tmp_path / "parent", images, **settings)[0] == 0
    parent = tmp_path / "parent" / "seed1" / "checkpoint.pt"
    still = {"skip_lr_scale": 1e-20, "finetune_from": parent, **settings}
    status, _, error = train(capfd, tmp_path / "run", images, **still)
    assert status == 0
    assert "3 of 3 learned coefficients of the skip connections never moved" in error


def test_seeds_that_end_together_write_one_summary_after_the_other(
    tmp_path, images, capfd, monkeypatch
):
    read_results, was_held = seeds._all_results, []

    def reads(config, identity):
        with locked(config.folder(), seeds.SUMMARY_LOCK) as file:
            was_held.append(file is None)
        return read_results(config, identity)

    monkeypatch.setattr(seeds, "_all_results", reads)
    assert train(capfd, tmp_path / "run", images)[0] == 0
    assert was_held == [True]


def test_seeds_give_mean_and_deviation(tmp_path, images, capfd):
    train(capfd, tmp_path / "run", images, seeds=[2])
    checkpoint = tmp_path / "run" / "seed2" / "checkpoint.pt"
    kept = checkpoint.stat().st_mtime_ns
    _, out, _ = train(capfd, tmp_path / "run", images, seeds=[2, 10])
    assert checkpoint.stat().st_mtime_ns == kept  # not trained again
    both = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    a, b = both["errors"]
    assert both["seeds"] == [2, 10] and both["mean"] == pytest.approx((a + b) / 2)
    assert both["standard_deviation"] == pytest.approx(abs(a - b) / math.sqrt(2))
    assert f"error of 2 seeds: {(a + b) / 2:.2f} ± {abs(a - b) / math.sqrt(2):.2f} %" in out
    train(capfd, tmp_path / "run", images, seeds=[10])  # as rskip run calls it, seed by seed
    assert json.loads((tmp_path / "run" / "summary.json").read_text("utf-8")) == both


@pytest.mark.parametrize("stop", [1, 4])
def test_every_saved_state_resumes_bit_for_bit(tmp_path, images, capfd, monkeypatch, whole, stop):
    with stop_at(monkeypatch, stop):
        assert train(capfd, tmp_path / "parts", images, save_interval=1)[0] == 130
    status, out, _ = train(capfd, tmp_path / "parts", images, save_interval=1, resume=True)
    assert status == 0 and f"resuming from iteration {stop} " in out
    assert_same_run(whole, tmp_path / "parts" / "seed1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_saves_and_says_so(tmp_path, images, capfd, monkeypatch, number):
    before = signal.getsignal(number)
    with stop_at(monkeypatch, 3, lambda: os.kill(os.getpid(), number)):
        status, _, error = train(capfd, tmp_path / "run", images)
    path = tmp_path / "run" / "seed1" / "checkpoint.pt"
    assert status == 128 + number
    assert f"\nstopped at iteration 4; --resume continues from {path}\n" in f"\n{error}"
    assert (
        torch.load(path, weights_only=True)["iteration"] == 4 and signal.getsignal(number) is before
    )


@pytest.mark.slow
def test_compile_trains_the_same(tmp_path, images, capfd, monkeypatch, whole):
    """The network is traced and differentiated ahead of time, and run as it is.

    That is what --compile adds beside the C++ compiler's minute.
    """
    compiler, calls = torch.compile, []

    def ahead_of_time(module):
        calls.append(module)
        return compiler(module, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", ahead_of_time)
    assert train(capfd, tmp_path / "compiled", images, compile=True)[0] == 0
    assert len(calls) == 1
    truth = weights(whole)
    for name, value in weights(tmp_path / "compiled" / "seed1").items():
        torch.testing.assert_close(value, truth[name], atol=1e-3, rtol=1e-3)


@pytest.fixture
def config(images, tmp_path):
    return {"data": images, "cache": str(tmp_path), "depth": 8, "batch_size": 6}


def test_amp_trains_in_the_type_it_names(config):
    config = Config(**config, amp="bf16", warmup_iterations=0)
    trainer = Trainer(config, 1, load(config), Group(0, 1, torch.device("cpu")))
    seen = []
    trainer.module.conv.register_forward_hook(lambda _m, _i, y: seen.append(y.dtype))
    assert trainer.train_step().isfinite()
    assert seen == [torch.bfloat16] and {p.dtype for p in trainer.module.parameters()} == {
        torch.float32
    }


def test_a_step_is_sgd_with_momentum_and_decay_on_the_mean_loss(config):
    """Two steps against the update rule written out, from the trainer's own batches."""
    config = Config(**config, warmup_iterations=1)
    group, data = Group(0, 1, torch.device("cpu")), load(config)
    ours, twin = Trainer(config, 1, data, group), Trainer(config, 1, data, group)
    velocity = [torch.zeros_like(p) for p in twin.module.parameters()]
    for rate in (0.01, 0.1):
        batch = twin.stream.next()
        logits = twin.module(twin.augmenter.train(data.train_images, batch))
        loss = -logits.log_softmax(1)[torch.arange(6), data.train_labels[batch.index]].mean()
        parameters = list(twin.module.parameters())
        with torch.no_grad():
            for p, v, g in zip(parameters, velocity, torch.autograd.grad(loss, parameters)):
                v.mul_(0.9).add_(g + 2e-4 * p)
                p -= rate * v
        assert ours.train_step().item() == pytest.approx(loss.item(), rel=1e-5)
    for p, q in zip(ours.module.parameters(), twin.module.parameters()):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-4)
