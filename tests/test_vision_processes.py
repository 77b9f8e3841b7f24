"""train_cifar.py as real processes: without fairseq, killed, out of space, interrupted, several under torchrun."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, run_command
from vision_helpers import SCRIPT, arguments, history, train_process, write_folder

from fairseq_rskip.vision.config import Config
from fairseq_rskip.vision.data import load
from fairseq_rskip.vision.distributed import Group
from fairseq_rskip.vision.trainer import Trainer

DIES_AT_ITERATION_7 = """
import os, signal
from fairseq_rskip.vision.trainer import Trainer
step = Trainer.train_step

def dying(self):
    if self.iteration == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self)

Trainer.train_step = dying
"""
WITHOUT_FAIRSEQ = """
import sys
for name in ("fairseq", "omegaconf", "hydra"):
    sys.modules[name] = None  # importing it raises ImportError
import runpy
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return f"imagefolder:{write_folder(tmp_path_factory.mktemp('ảnh nhỏ') / 'set')}"


def weights(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]


def assert_same_run(a, b):
    ours, truth = weights(a), weights(b)
    assert ours.keys() == truth.keys() and all(torch.equal(ours[name], truth[name]) for name in ours)
    assert history(a) == history(b)


def start(output, data, **options):
    """A run in the background, one thread, as ``train_process`` would start it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), *arguments(output, data, **options)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", text=True
    )


def wait_for(path, process, timeout=60):
    deadline = time.monotonic() + timeout
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


@pytest.mark.slow
def test_runs_where_fairseq_cannot_be_imported(tmp_path, images):
    argv = [sys.executable, "-c", WITHOUT_FAIRSEQ, SCRIPT, *arguments(tmp_path / "run", images, iterations=4)]
    done = run_command(argv)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "seed1" / "result.json").read_text("utf-8"))["iterations"] == 4


def kill_and_resume(tmp_path, images, iterations, delays):
    """Kill a run after each of ``delays`` seconds from its first checkpoint (or resumption) on, then let it finish."""
    options = {"iterations": iterations, "save_interval": 1, "resume": True}
    whole = start(tmp_path / "whole", images, **options)
    path = tmp_path / "killed" / "seed1" / "checkpoint.pt"
    for delay in delays:
        before = path.stat().st_mtime_ns if path.exists() else 0
        process = start(tmp_path / "killed", images, **options)
        while process.poll() is None and not (path.exists() and path.stat().st_mtime_ns != before):
            time.sleep(0.005)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the run ended before it was killed: it should be longer"
        torch.load(path, weights_only=True)  # whole at any moment
    done = train_process(tmp_path / "killed", images, **options)
    assert done.returncode == 0 and "going on from iteration" in done.stdout, done.stderr
    out, error = whole.communicate(timeout=100)
    assert whole.returncode == 0 and "going on" not in out, error
    assert_same_run(tmp_path / "killed" / "seed1", tmp_path / "whole" / "seed1")
    assert not list((tmp_path / "killed" / "seed1").glob(".*.part"))


@pytest.mark.slow
def test_killed_many_times_equals_uninterrupted(tmp_path, images):
    draw = random.Random(5)
    kill_and_resume(tmp_path, images, 80, [draw.uniform(0, 0.2) for _ in range(3)])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_so(tmp_path, images, number):
    process = start(tmp_path / "run", images, iterations=100_000)
    wait_for(tmp_path / "run" / "seed1" / "checkpoint.pt", process)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    path = tmp_path / "run" / "seed1" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    assert process.returncode == 128 + number
    assert error == f"error: stopped at iteration {state['iteration']}; --resume goes on from {path}\n"


@pytest.mark.slow
def test_a_full_disk_keeps_what_is_there(tmp_path, images):
    """Files may grow to 200 KB, the checkpoint needs 600 KB."""
    command = [sys.executable, str(SCRIPT), *arguments(tmp_path / "run", images)]
    path = tmp_path / "run" / "seed1" / "checkpoint.pt"
    path.parent.mkdir(parents=True)
    done = run_command(["bash", "-c", 'ulimit -f 200; exec "$@"', "bash", *command])
    assert done.returncode == 1
    assert done.stderr == f"error: cannot write {path}: File too large\n"
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "log.jsonl"]


def torchrun(processes, argv, **options):
    return run_command(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", SCRIPT, *argv],
        **options,
    )


def reference_of_two_processes(config, iterations):
    """One process: each half of a batch has its own batch statistics, the update is the mean of the halves' gradients.

    Running statistics are those that the first half leaves behind.
    """
    data = load(config)
    trainer = Trainer(config, 1, data, Group(0, 1, torch.device("cpu")))
    model = trainer.module.train()
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    for iteration in range(iterations):
        batch = trainer.stream.next()
        half = config.batch_size // 2
        gradients = []
        for part in (slice(half, None), slice(0, half)):
            kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
            chosen = type(batch)(*(tensor[part] for tensor in batch))
            logits = model(trainer.augmenter.train(data.train_images, chosen))
            loss = F.cross_entropy(logits, data.train_labels[chosen.index])
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
            if part.start:
                for name, buffer in model.named_buffers():
                    buffer.copy_(kept[name])
        with torch.no_grad():
            for p, v, a, b in zip(model.parameters(), velocity, *gradients):
                v.mul_(0.9).add_((a + b) / 2 + 2e-4 * p)
                p -= config.learning_rate(iteration) * v
    return trainer


@pytest.mark.slow
def test_two_processes_equal_one_with_their_halves_and_resume(tmp_path, images):
    argv = arguments(tmp_path / "two", images, save_interval=2)
    done = torchrun(2, argv)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("seed 1: error") == 1
    config = Config(
        data=images, cache=str(tmp_path / "cache"), depth=8, batch_size=8, iterations=6, warmup_iterations=1
    )
    truth = reference_of_two_processes(config, 6)
    for name, value in weights(tmp_path / "two" / "seed1").items():
        torch.testing.assert_close(
            value, truth.module.state_dict()[name], atol=2e-4, rtol=2e-3, msg=lambda m, n=name: n + m
        )
    tested = truth.test()
    last = history(tmp_path / "two" / "seed1")[-1]
    assert last["test_error"] == pytest.approx(tested["test_error"])
    assert last["test_loss"] == pytest.approx(tested["test_loss"], rel=1e-3)


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit(tmp_path, images):
    argv = arguments(tmp_path / "whole", images, iterations=20, save_interval=1)
    assert torchrun(2, argv).returncode == 0
    argv = arguments(tmp_path / "parts", images, iterations=20, save_interval=1, resume=True)
    (tmp_path / "sitecustomize.py").write_text(DIES_AT_ITERATION_7)
    assert torchrun(2, argv, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}).returncode != 0
    done = torchrun(2, argv)
    assert done.returncode == 0 and "going on from iteration 7" in done.stdout, done.stderr[-2000:]
    assert_same_run(tmp_path / "whole" / "seed1", tmp_path / "parts" / "seed1")


@pytest.mark.slow
def test_a_batch_that_processes_cannot_share_is_one_line(tmp_path, images):
    done = torchrun(2, arguments(tmp_path / "run", images, batch_size=9))
    assert done.returncode != 0
    assert done.stderr.count("error: --batch-size 9: expected a multiple of the 2 processes\n") == 1
