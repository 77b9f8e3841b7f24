"""What a training run refuses, and what it keeps when something fails."""

import fcntl
import math

import pytest
import torch
from vision_helpers import (
    assert_same_run,
    refused,
    stop_at,
    train,
    write_folder,
    write_image,
)

from fairseq_rskip import files
from fairseq_rskip.vision import trainer as trainer_module
from fairseq_rskip.vision.trainer import Group, Trainer


def test_an_unfinished_run_is_never_overwritten(stopped_copy, images, capfd):
    path = stopped_copy / "seed1" / "checkpoint.pt"
    before = path.read_bytes()
    assert refused(train(capfd, stopped_copy, images)).startswith(
        f"{path} is of an earlier run: --resume "
    )
    assert path.read_bytes() == before


def test_runs_of_other_settings_are_refused(stopped_copy, whole, images, capfd):
    path = stopped_copy / "seed1" / "checkpoint.pt"
    line = refused(train(capfd, stopped_copy, images, resume=True, depth=14, skip_kind="xskip"))
    assert line.startswith(
        f"{path} is of another run: --depth: 8 there, 14 here; --skip-kind: rskip there, xskip here"
    )
    assert path.is_file()
    for seed in (1, 2):  # the folder's summary is of one network
        line = refused(train(capfd, whole.parent, images, depth=14, seeds=[seed]))
        assert "seed1/result.json is of another run: --depth: 8 there, 14 here" in line


@pytest.mark.parametrize("done", [False, True], ids=["unfinished", "finished"])
def test_other_images_are_refused_and_the_same_elsewhere_are_not(
    tmp_path, capfd, monkeypatch, done
):
    folder = write_folder(tmp_path / "set")
    (tmp_path / "link").symlink_to(folder)
    with stop_at(monkeypatch, 99 if done else 3):
        train(capfd, tmp_path / "run", f"imagefolder:{folder}/", save_interval=1)
    kept = folder / "train" / "cat" / "0.png"
    pixels = kept.read_bytes()
    write_image(kept, seed="another picture")
    line = refused(train(capfd, tmp_path / "run", f"imagefolder:{folder}", resume=True))
    assert (
        f"{'result.json' if done else 'checkpoint.pt'} is of another run: "
        "SHA-256 of images and labels: " in line
    )
    if done:  # nor is another seed trained beside it
        line = refused(train(capfd, tmp_path / "run", f"imagefolder:{folder}", seeds=[2]))
        assert "seed1/result.json is of another run: SHA-256 of images and labels: " in line
    kept.write_bytes(pixels)
    monkeypatch.chdir(tmp_path)
    status, out, error = train(capfd, tmp_path / "run", "imagefolder:link", resume=True)
    assert status == 0 and ("resuming from iteration 3" in out) != done, error


def damaged(change):
    """What writes a checkpoint after ``change(its state)``."""

    def write(path):
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)

    return write


BAD_CHECKPOINTS = {
    "half": (
        lambda path: path.write_bytes(path.read_bytes()[:3000]),
        "truncated, or not a checkpoint",
    ),
    "another program's": (
        lambda path: torch.save({"model": {}}, path),
        "is not a checkpoint of train_cifar.py",
    ),
    "no history": (
        damaged(lambda state: state.pop("history")),
        "does not fit this network: 'history'",
    ),
    "NaN weights": (
        damaged(lambda state: state["model"]["fc.bias"].fill_(math.nan)),
        "weights that are not finite",
    ),
}


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_a_damaged_or_foreign_checkpoint_is_one_line(stopped_copy, images, capfd, name):
    damage, message = BAD_CHECKPOINTS[name]
    path = stopped_copy / "seed1" / "checkpoint.pt"
    damage(path)
    before = path.read_bytes()
    line = refused(train(capfd, stopped_copy, images, resume=True))
    assert message in line and str(path) in line
    assert path.read_bytes() == before and not (stopped_copy / "seed1" / "result.json").exists()


@pytest.mark.parametrize("content", [b"\xff\xfe{", b"[1", b"[]"], ids=["bytes", "cut", "list"])
def test_a_file_in_the_place_of_a_result_is_one_line(stopped_copy, images, capfd, content):
    path = stopped_copy / "seed1" / "result.json"
    path.write_bytes(content)
    line = refused(train(capfd, stopped_copy, images, resume=True))
    assert line.startswith(f"{path} is not a result of train_cifar.py; remove it, or choose")


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(
    tmp_path, images, capfd, monkeypatch
):
    cross_entropy = trainer_module.F.cross_entropy
    calls = []

    def breaks(logits, y, **options):
        if torch.is_grad_enabled():
            calls.append(1)
        return cross_entropy(logits, y, **options) * (math.nan if len(calls) == 4 else 1)

    monkeypatch.setattr(trainer_module.F, "cross_entropy", breaks)
    path = tmp_path / "run" / "seed1" / "checkpoint.pt"
    line = (
        "stopped at iteration 4, the loss is not finite; "
        f"the last good checkpoint is {path}; try a lower --lr"
    )
    assert refused(train(capfd, tmp_path / "run", images)).startswith(line)
    state = torch.load(path, weights_only=True)
    assert state["iteration"] == 3 and all(v.isfinite().all() for v in state["model"].values())


def test_gradients_that_overflow_in_fp16_stop_the_run(tmp_path, images, capfd, monkeypatch):
    """A CPU's scaler halves its scale at every overflow.

    It goes from 1e-3 to below 1e-4 in four iterations.
    """
    small = torch.amp.GradScaler("cpu", init_scale=1e-3)
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *_, **__: small)
    wrapped = Trainer._wrapped

    def overflowing(self):
        self.module.fc.bias.register_hook(lambda gradient: gradient * float("inf"))
        return wrapped(self)

    monkeypatch.setattr(Trainer, "_wrapped", overflowing)
    expected = "stopped at iteration 4, gradients overflow (loss scale 6e-05); "
    assert refused(train(capfd, tmp_path / "run", images)).startswith(expected)


def test_a_disk_that_fills_up_keeps_the_last_checkpoint(
    tmp_path, images, capfd, monkeypatch, whole
):
    real, writes = files.os.fsync, []

    def full(handle):
        writes.append(handle)
        if len(writes) > 6:  # the second checkpoint
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(files.os, "fsync", full)
    path = tmp_path / "run" / "seed1" / "checkpoint.pt"
    line = refused(train(capfd, tmp_path / "run", images, save_interval=1))
    monkeypatch.undo()
    assert line == f"cannot write {path}: No space left on device"
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "checkpoint.pt", "log.jsonl"]
    assert train(capfd, tmp_path / "run", images, save_interval=1, resume=True)[0] == 0
    assert_same_run(whole, tmp_path / "run" / "seed1")


def test_one_process_trains_in_a_folder(tmp_path, images, capfd):
    folder = tmp_path / "run" / "seed1"
    folder.mkdir(parents=True)
    part = folder / ".checkpoint.pt.4711.part"
    part.write_text("what the other process is writing")
    with open(folder / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = refused(train(capfd, tmp_path / "run", images, resume=True))
    assert line == f"another process is training in {folder}: wait, or choose another --output"
    assert sorted(path.name for path in folder.iterdir()) == [part.name, ".lock"]
    assert train(capfd, tmp_path / "run", images, resume=True)[0] == 0 and not part.exists()


@pytest.mark.parametrize(("rank", "said"), [(0, ""), (1, "process 1: ")])
def test_each_process_says_its_own_failure(tmp_path, images, capfd, monkeypatch, rank, said):
    """One process alone may have no memory left."""

    def fill_memory(config, group):
        raise MemoryError

    group = trainer_module.Group(rank, 2, torch.device("cpu"))
    monkeypatch.setattr(trainer_module, "join", lambda device: group)
    monkeypatch.setattr("fairseq_rskip.vision.seeds.train_all", fill_memory)
    line = refused(train(capfd, tmp_path / "run", images))
    assert line.startswith(f"{said}the memory is full: try a smaller --batch-size")


def test_only_a_compiled_training_is_told_to_train_without(tmp_path, images, capfd, monkeypatch):
    def fail(config, group):
        raise torch._C._LinAlgError("no solution")

    monkeypatch.setattr("fairseq_rskip.vision.seeds.train_all", fail)
    with pytest.raises(torch._C._LinAlgError):
        train(capfd, tmp_path / "run", images)
    line = refused(train(capfd, tmp_path / "run", images, compile=True))
    assert line == "--compile failed, train without it: no solution"


def test_a_batch_that_the_processes_cannot_share_is_one_line(tmp_path, images, monkeypatch, capfd):
    group = Group(0, 3, torch.device("cpu"))
    monkeypatch.setattr(trainer_module, "join", lambda device: group)
    line = refused(train(capfd, tmp_path / "run", images, batch_size=8))
    assert line == "--batch-size 8: expected a multiple of the 3 processes"
