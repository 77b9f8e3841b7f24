"""Training runs: the log, the result, seeds, going on, what is kept when something fails, and one step by hand."""

import json
import math

import pytest
import torch
from vision_helpers import CLASSES, error_line, history, train, write_folder

from fairseq_rskip.vision import trainer as trainer_module
from fairseq_rskip.vision.config import Config
from fairseq_rskip.vision.data import load
from fairseq_rskip.vision.distributed import Group
from fairseq_rskip.vision.trainer import Trainer


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return f"imagefolder:{write_folder(tmp_path_factory.mktemp('ảnh nhỏ') / 'set')}"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def weights(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]


def assert_same_weights(a, b):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_logs_every_epoch_and_reports_the_last_iterations_error(tmp_path, images, capfd):
    status, out, error = train(capfd, tmp_path / "run", images, iterations=7, tensorboard=True)
    assert (status, error) == (0, "")
    folder = tmp_path / "run" / "seed1"
    records = history(folder)
    assert [(r["epoch"], r["iteration"], r["lr"]) for r in records] == [
        (1, 2, 0.1),
        (2, 3, 0.1),
        (3, 5, 0.01),
        (4, 6, 0.001),
        (5, 7, 0.001),
    ]  # 12 images, 8 a batch
    result = json.loads((folder / "result.json").read_text("utf-8"))
    assert result["error"] == records[-1]["test_error"]
    assert result["best_error"] == min(r["test_error"] for r in records) == records[-1]["best_error"]
    assert result["config"]["depth"] == 8 and result["versions"]["torch"] == torch.__version__
    assert result["images_per_second"] > 0 and result["parameters"] == 75_738 - 7 * 65
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    assert sum(line.startswith("epoch ") for line in out.splitlines()) == 5
    assert f"seed 1: error {result['error']:.2f} %" in out


@pytest.mark.slow
def test_it_learns(tmp_path, capfd):
    options = {"iterations": 100, "batch_size": 64, "milestones": [80], "train_images": 200, "test_interval": 99}
    assert train(capfd, tmp_path / "run", "digits", **options)[0] == 0
    records = history(tmp_path / "run" / "seed1")
    assert records[-1]["train_loss"] < 1.2 < records[0]["train_loss"]
    assert records[-1]["test_error"] < 45 and "test_error" not in records[0]


def test_seeds_give_mean_and_deviation_and_finished_ones_are_not_run_again(tmp_path, images, capfd):
    _, out, _ = train(capfd, tmp_path / "run", images, seeds=[3, 4])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    a, b = summary["errors"]
    assert summary["seeds"] == [3, 4] and summary["mean"] == pytest.approx((a + b) / 2)
    assert summary["standard_deviation"] == pytest.approx(abs(a - b) / math.sqrt(2))
    assert f"error of 2 seeds: {(a + b) / 2:.2f} ± {abs(a - b) / math.sqrt(2):.2f} %" in out
    assert not all(
        torch.equal(v, weights(tmp_path / "run/seed4")[k]) for k, v in weights(tmp_path / "run/seed3").items()
    )
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("seed*/*")}
    status, out, _ = train(capfd, tmp_path / "run", images, seeds=[3, 4, 5])
    assert status == 0 and "error of 3 seeds" in out and out.count("\nepoch ") == 4  # one seed's four epochs
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_the_same_seed_twice_gives_the_same_weights(tmp_path, images, capfd):
    for name in ("a", "b"):
        assert train(capfd, tmp_path / name, images)[0] == 0
    assert_same_weights(tmp_path / "a" / "seed1", tmp_path / "b" / "seed1")
    assert history(tmp_path / "a" / "seed1") == history(tmp_path / "b" / "seed1")


@pytest.mark.parametrize("stop", [1, 2, 4, 5])
def test_every_saved_state_goes_on_bit_for_bit(tmp_path, images, capfd, monkeypatch, stop):
    assert train(capfd, tmp_path / "whole", images)[0] == 0
    step = Trainer.train_step

    def stop_after(self):
        if self.iteration == stop:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Trainer, "train_step", stop_after)
    assert train(capfd, tmp_path / "parts", images, save_interval=1)[0] == 130
    monkeypatch.undo()
    torch.manual_seed(999)
    status, out, _ = train(capfd, tmp_path / "parts", images, save_interval=1, resume=True)
    assert status == 0 and f"going on from iteration {stop} " in out
    assert_same_weights(tmp_path / "whole" / "seed1", tmp_path / "parts" / "seed1")
    assert history(tmp_path / "whole" / "seed1") == history(tmp_path / "parts" / "seed1")


def test_resume_with_nothing_to_resume_starts(tmp_path, images, capfd):
    status, out, _ = train(capfd, tmp_path / "run", images, resume=True)
    assert status == 0 and "going on" not in out


def test_an_unfinished_run_is_never_overwritten(tmp_path, images, capfd):
    train(capfd, tmp_path / "run", images)
    (tmp_path / "run" / "seed1" / "result.json").unlink()
    status, _, error = train(capfd, tmp_path / "run", images)
    path = tmp_path / "run" / "seed1" / "checkpoint.pt"
    assert status == 1
    assert error_line(error) == f"{path} is of an earlier run: --resume goes on, --output starts elsewhere"


def test_a_checkpoint_of_another_model_is_refused(tmp_path, images, capfd):
    train(capfd, tmp_path / "run", images)
    folder = tmp_path / "run" / "seed1"
    status, _, error = train(capfd, tmp_path / "run", images, depth=14)
    assert status == 1 and "result.json is of another run: --depth: 8 there, 14 here; choose" in error_line(error)
    (folder / "result.json").unlink()
    options = {"resume": True, "depth": 14, "skip_kind": "xskip"}
    status, _, error = train(capfd, tmp_path / "run", images, **options)
    expected = "checkpoint.pt is of another run: --depth: 8 there, 14 here; --skip-kind: rskip there, xskip here"
    assert status == 1 and error_line(error).endswith(expected)
    assert (folder / "checkpoint.pt").is_file()


def test_a_checkpoint_for_other_images_is_refused(tmp_path, capfd):
    folder = write_folder(tmp_path / "set")
    train(capfd, tmp_path / "run", f"imagefolder:{folder}")
    (tmp_path / "run" / "seed1" / "result.json").unlink()
    for split in ("train", "test"):
        (folder / split / "dog").rename(folder / split / "wolf")
    status, _, error = train(capfd, tmp_path / "run", f"imagefolder:{folder}", resume=True)
    assert status == 1 and "is of another run: classes: Vịt, cat, dog there, Vịt, cat, wolf here" in error_line(error)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 half", None])
def test_a_broken_or_foreign_checkpoint_is_one_line(tmp_path, images, capfd, content):
    path = tmp_path / "run" / "seed1" / "checkpoint.pt"
    path.parent.mkdir(parents=True)
    if content is None:
        torch.save({"model": {}}, path)
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    status, _, error = train(capfd, tmp_path / "run", images, resume=True)
    assert status == 1 and str(path) in error_line(error)
    assert path.read_bytes() == before


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path, images, capfd, monkeypatch):
    cross_entropy = trainer_module.F.cross_entropy
    calls = []

    def breaks(logits, y, **options):
        if torch.is_grad_enabled():
            calls.append(1)
        return cross_entropy(logits, y, **options) * (math.nan if len(calls) == 4 else 1)

    monkeypatch.setattr(trainer_module.F, "cross_entropy", breaks)
    status, _, error = train(capfd, tmp_path / "run", images)
    path = tmp_path / "run" / "seed1" / "checkpoint.pt"
    line = error_line(error)
    assert status == 1 and line.startswith("the loss is not finite at iteration 4: stopped, the last good checkpoint ")
    assert str(path) in line and "try a lower --lr" in line
    state = torch.load(path, weights_only=True)
    assert state["iteration"] == 3 and all(v.isfinite().all() for v in state["model"].values())


def test_weights_that_an_update_broke_are_not_saved(tmp_path, images, capfd):
    """The loss of the first iteration is finite, its update is not."""
    options = {"warmup_lr": 1e38, "weight_decay": 1e38, "save_interval": 1}
    status, _, error = train(capfd, tmp_path / "run", images, **options)
    tries = "try a lower --lr, a longer --warmup-iterations, --amp off or another --skip-norm"
    expected = f"weights are not finite after iteration 1: stopped, there is no checkpoint yet; {tries}"
    assert status == 1 and error_line(error) == expected
    assert not (tmp_path / "run" / "seed1" / "checkpoint.pt").exists()


def test_a_disk_that_fills_up_keeps_the_last_checkpoint(tmp_path, images, capfd, monkeypatch):
    from fairseq_rskip import files

    assert train(capfd, tmp_path / "whole", images)[0] == 0
    real, writes = files.os.fsync, []

    def full(handle):
        writes.append(handle)
        if len(writes) > 4:
            raise OSError(28, "No space left on device")
        return real(handle)

    monkeypatch.setattr(files.os, "fsync", full)
    status, _, error = train(capfd, tmp_path / "run", images, save_interval=1)
    monkeypatch.undo()
    path = tmp_path / "run" / "seed1" / "checkpoint.pt"
    assert status == 1 and error_line(error) == f"cannot write {path}: No space left on device"
    assert torch.load(path, weights_only=True)["iteration"] >= 1
    assert [p.name for p in path.parent.iterdir() if p.name.endswith(".part")] == []
    assert train(capfd, tmp_path / "run", images, save_interval=1, resume=True)[0] == 0
    assert_same_weights(tmp_path / "whole" / "seed1", path.parent)


def test_an_output_folder_that_cannot_be_made_is_one_line(tmp_path, images, capfd):
    (tmp_path / "file").write_text("")
    status, _, error = train(capfd, tmp_path / "file" / "run", images, cache=tmp_path)
    assert status == 1 and "Not a directory" in error_line(error)


@pytest.mark.slow
def test_compile_trains_the_same_and_resumes_without_it(tmp_path, images, capfd, monkeypatch):
    """Traced and differentiated ahead of time, run as it is: what --compile adds beside the C++ compiler's minute."""
    assert train(capfd, tmp_path / "plain", images)[0] == 0
    compiler, calls = torch.compile, []

    def ahead_of_time(module):
        calls.append(module)
        return compiler(module, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", ahead_of_time)
    assert train(capfd, tmp_path / "compiled", images, compile=True)[0] == 0
    assert len(calls) == 1
    truth = weights(tmp_path / "plain" / "seed1")
    for name, value in weights(tmp_path / "compiled" / "seed1").items():
        torch.testing.assert_close(value, truth[name], atol=1e-3, rtol=1e-3)
    (tmp_path / "compiled" / "seed1" / "result.json").unlink()
    assert train(capfd, tmp_path / "compiled", images, resume=True)[0] == 0


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_amp_trains_in_the_type_it_names(images, cache, amp):
    config = Config(data=images, cache=str(cache), depth=8, batch_size=6, amp=amp, warmup_iterations=0)
    trainer = Trainer(config, 1, load(config), Group(0, 1, torch.device("cpu")))
    seen = []
    trainer.module.conv.register_forward_hook(lambda _m, _i, y: seen.append(y.dtype))
    assert trainer.train_step().isfinite()
    assert seen == [{"off": torch.float32, "bf16": torch.bfloat16}[amp]]
    assert {p.dtype for p in trainer.module.parameters()} == {torch.float32}


def test_a_step_is_sgd_with_momentum_and_decay_on_the_mean_loss(images, cache):
    """Two steps against the update rule written out, from the trainer's own batches."""
    config = Config(data=images, cache=str(cache), depth=8, batch_size=6, warmup_iterations=1)
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
    assert len(CLASSES) == len(data.classes)
