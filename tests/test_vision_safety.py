"""What guards a run: one process a folder, the same data, memory, a reader that left, overflow, all finished seeds."""

import fcntl
import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from vision_helpers import SCRIPT, arguments, error_line, history, train, write_folder, write_image

from fairseq_rskip.vision import logs
from fairseq_rskip.vision import trainer as trainer_module
from fairseq_rskip.vision.config import Config
from fairseq_rskip.vision.logs import RunLog
from fairseq_rskip.vision.trainer import Trainer


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return f"imagefolder:{write_folder(tmp_path_factory.mktemp('ảnh nhỏ') / 'set')}"


def half_a_run(capfd, monkeypatch, output, data):
    """Stop after 3 of 6 iterations."""
    step = Trainer.train_step

    def stop(self):
        if self.iteration == 3:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Trainer, "train_step", stop)
    assert train(capfd, output, data, save_interval=1)[0] == 130
    monkeypatch.undo()


def test_a_folder_that_another_process_trains_in_is_left_alone(tmp_path, images, capfd):
    folder = tmp_path / "run" / "seed1"
    folder.mkdir(parents=True)
    part = folder / ".checkpoint.pt.4711.part"
    part.write_text("what the other process is writing")
    with open(folder / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, _, error = train(capfd, tmp_path / "run", images, resume=True)
    assert status == 1
    assert error_line(error) == f"another process is training in {folder}: wait for it, or choose another --output"
    assert sorted(path.name for path in folder.iterdir()) == [part.name, ".lock"]
    assert train(capfd, tmp_path / "run", images, resume=True)[0] == 0
    assert not part.exists()


def test_a_run_holds_the_lock_while_it_trains(tmp_path, images, capfd, monkeypatch):
    step, tried = Trainer.train_step, []

    def look(self):
        with open(tmp_path / "run" / "seed1" / ".lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        tried.append(1)
        return step(self)

    monkeypatch.setattr(Trainer, "train_step", look)
    assert train(capfd, tmp_path / "run", images)[0] == 0 and len(tried) == 6


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("done", [False, True])
def test_other_images_of_the_same_names_are_refused(tmp_path, capfd, monkeypatch, split, done):
    folder = write_folder(tmp_path / "set")
    if done:
        train(capfd, tmp_path / "run", f"imagefolder:{folder}")
    else:
        half_a_run(capfd, monkeypatch, tmp_path / "run", f"imagefolder:{folder}")
    write_image(folder / split / "cat" / "0.png", seed="another picture")
    status, _, error = train(capfd, tmp_path / "run", f"imagefolder:{folder}", resume=True)
    name = "result.json" if done else "checkpoint.pt"
    assert status == 1 and f"{name} is of another run: SHA-256 of images and labels: " in error_line(error)


def test_the_same_images_under_another_path_are_accepted(tmp_path, capfd, monkeypatch):
    folder = write_folder(tmp_path / "set")
    (tmp_path / "link").symlink_to(folder)
    half_a_run(capfd, monkeypatch, tmp_path / "run", f"imagefolder:{folder}/")
    monkeypatch.chdir(tmp_path)
    status, out, error = train(capfd, tmp_path / "run", "imagefolder:link", resume=True)
    assert status == 0 and "going on from iteration 3" in out, error
    status, out, _ = train(capfd, tmp_path / "run", "imagefolder:./set")  # finished, and so not trained again
    assert status == 0 and "epoch 1 " not in out


@pytest.mark.parametrize("asks", [lambda: torch.empty(2**60, dtype=torch.uint8), lambda: bytearray(2**62)])
def test_memory_that_is_full_is_one_line(tmp_path, images, capfd, monkeypatch, asks):
    monkeypatch.setattr(Trainer, "train_step", lambda self: asks())
    status, _, error = train(capfd, tmp_path / "run", images)
    assert status == 1 and error_line(error) == "the memory is full: try a smaller --batch-size"


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["stdout", "both"])
def test_a_reader_that_leaves_does_not_cost_the_training(tmp_path, images, closed):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, str(SCRIPT), *arguments(tmp_path / "run", images)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    error = subprocess.PIPE if closed == "stdout" else write
    done = subprocess.run(command, env=environment, stdout=write, stderr=error, timeout=120, check=False)
    os.close(write)
    assert done.returncode == 0 and not done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))["seeds"] == [1]


def test_the_summary_is_of_all_finished_seeds_with_these_settings(tmp_path, images, capfd):
    def summary():
        return json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))

    train(capfd, tmp_path / "run", images, seeds=[2, 10])
    both = summary()
    for name, content in (("seed77", {"depth": 14}), ("seedling", {})):
        other = json.loads((tmp_path / "run" / "seed2" / "result.json").read_text("utf-8"))
        other["config"].update(content)
        (tmp_path / "run" / name).mkdir()
        (tmp_path / "run" / name / "result.json").write_text(json.dumps(other))
    _, out, _ = train(capfd, tmp_path / "run", images, seeds=[10])
    assert summary() == both and both["seeds"] == [2, 10] and "error of 2 seeds" in out
    train(capfd, tmp_path / "run", images, seeds=[3])
    assert summary()["seeds"] == [2, 3, 10]


def test_gradients_that_overflow_in_fp16_stop_the_run(tmp_path, images, capfd, monkeypatch):
    """A CPU's scaler, which halves its scale at every overflow: from 1e-3 to below 1e-4 in four iterations."""
    monkeypatch.setattr(trainer_module, "_gradient_scaler", lambda _: torch.amp.GradScaler("cpu", init_scale=1e-3))
    wrapped = Trainer._wrapped

    def overflowing(self):
        self.module.fc.bias.register_hook(lambda gradient: gradient * float("inf"))
        return wrapped(self)

    monkeypatch.setattr(Trainer, "_wrapped", overflowing)
    status, _, error = train(capfd, tmp_path / "run", images)
    line = error_line(error)
    assert status == 1 and line.startswith("gradients overflow at iteration 4, the loss scale is down to 6e-05: ")
    assert "try a lower --lr" in line and "--amp bf16" in line


def test_the_bar_shows_loss_rate_and_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(logs, "FIGURES_EVERY", -1)
    log = RunLog(tmp_path, [{"iteration": 400, "test_error": 12.5}], Config(), active=True)
    log.iteration(401, torch.tensor(1.25))
    assert log.bar.n == 401 and log.bar.postfix == "loss=1.2500, lr=0.1, test error=12.50 %"
    log.close()
    assert history(tmp_path) == [{"iteration": 400, "test_error": 12.5}]
