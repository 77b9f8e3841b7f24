"""train_cifar.py as real processes: without fairseq or a reader, killed, two at once."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, run_command, skip_lines
from vision_helpers import SCRIPT, arguments, assert_same_run, history, train, weights

from fairseq_rskip.vision.config import Config
from fairseq_rskip.vision.data import load
from fairseq_rskip.vision.trainer import Group, Trainer

pytestmark = pytest.mark.slow
# train_cifar.py in a process that imports neither fairseq nor what that brings
WITHOUT_FAIRSEQ = """
import runpy, sys
for name in ("fairseq", "omegaconf", "hydra"):
    sys.modules[name] = None  # importing it raises ImportError
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# trainings in two processes, as torchrun starts them; the first process of one that "dies" is
# killed after iteration 3; prints the random number that each process would draw after each update
IN_TWO = """
import json, os, signal, socket, sys
import torch._dynamo, torchvision.datasets  # seconds, once for all processes
from torch import rand
from torch.distributed import all_gather_object
from torch.multiprocessing import ProcessExitedException, start_processes
from fairseq_rskip.vision.main import main
from fairseq_rskip.vision.trainer import Trainer

def train(rank, argv, dies):
    step = Trainer.train_step

    def watched(self):
        if self.iteration == 3 and rank == 0 and dies:
            os.kill(os.getpid(), signal.SIGKILL)
        loss, draws = step(self), [None, None]
        all_gather_object(draws, float(rand(())))
        if self.group.first:
            print("draws", *draws, flush=True)
        return loss

    Trainer.train_step = watched
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    sys.exit(main(argv))

for argv in map(json.loads, sys.argv[1:]):
    dies = argv[0] == "dies"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    try:
        start_processes(train, (argv[dies:], dies), nprocs=2, start_method="fork")
    except ProcessExitedException as error:
        assert dies and error.signal_name == "SIGKILL", error
"""


def in_two(*runs):
    """What trainings in two processes print."""
    done = run_command([sys.executable, "-c", IN_TWO, *map(json.dumps, runs)])
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_killed_run_resumes_to_the_same_bits_without_fairseq_or_reader(tmp_path, images, capfd):
    """fairseq cannot be imported.

    A reader that left (``... | head``) does not cost the training.
    """
    options = {"iterations": 40, "save_interval": 1, "resume": True}
    path = tmp_path / "killed" / "seed1" / "checkpoint.pt"
    command = [
        sys.executable,
        "-c",
        WITHOUT_FAIRSEQ,
        str(SCRIPT),
        *arguments(tmp_path / "killed", images, **options),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    reader, write = os.pipe()
    os.close(reader)
    killed = subprocess.Popen(command, env=environment, stdout=write, stderr=subprocess.PIPE)
    while killed.poll() is None and not path.exists():
        time.sleep(0.005)
    killed.kill()
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL, (
        "the run ended before it was killed: it should be longer"
    )
    assert torch.load(path, weights_only=True)["iteration"] < 40  # whole at any moment
    done = subprocess.run(
        command, env=environment, stdout=write, stderr=subprocess.PIPE, timeout=120, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads((tmp_path / "killed" / "summary.json").read_text("utf-8"))["seeds"] == [1]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert train(capfd, tmp_path / "whole", images, **options)[0] == 0
    finally:
        torch.set_num_threads(threads)
    assert_same_run(tmp_path / "killed" / "seed1", tmp_path / "whole" / "seed1")
    assert not list((tmp_path / "killed" / "seed1").glob(".*.part"))


def reference_of_two_processes(config, iterations):
    """Train in one process: each half of a batch has its own batch statistics.

    The update is the mean of the halves' gradients. Running statistics are those that the first
    half leaves behind.
    """
    data = load(config)
    trainer = Trainer(config, 1, data, Group(0, 1, torch.device("cpu")))
    model = trainer.module.train()
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    for iteration in range(iterations):
        batch, half, gradients = trainer.stream.next(), config.batch_size // 2, []
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for part in (slice(half, None), slice(0, half)):
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
            chosen = type(batch)(*(tensor[part] for tensor in batch))
            logits = model(trainer.augmenter.train(data.train_images, chosen))
            loss = F.cross_entropy(logits, data.train_labels[chosen.index])
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        with torch.no_grad():
            for p, v, a, b in zip(model.parameters(), velocity, *gradients):
                v.mul_(0.9).add_((a + b) / 2 + 2e-4 * p)
                p -= config.learning_rate(iteration) * v
    return trainer


def test_two_processes_equal_one_with_their_halves(tmp_path, images):
    # a low rate: at 0.1 a rounding of the sum over processes grows to percents within six updates
    options = {"save_interval": 1, "log_interval": 1, "valid_images": 3, "lr": 0.02}
    assert in_two(arguments(tmp_path / "whole", images, **options)).count("seed 1: error") == 1
    settings = {"data": images, "cache": str(tmp_path / "cache"), "valid_images": 3, "lr": 0.02}
    config = Config(**settings, depth=8, batch_size=8, iterations=6, warmup_iterations=1)
    truth = reference_of_two_processes(config, 6)
    for name, value in weights(tmp_path / "whole" / "seed1").items():
        expected = truth.module.state_dict()[name]
        torch.testing.assert_close(
            value, expected, atol=2e-4, rtol=2e-3, msg=lambda m, n=name: n + m
        )
    last = history(tmp_path / "whole" / "seed1")[-1]
    for name, value in truth.test().items():
        assert last[name] == pytest.approx(value, rel=1e-3)


def test_every_process_draws_other_masks_and_all_resume_bit_for_bit(tmp_path, images):
    """Stochastic depth is on, in a whole run and in one that dies and resumes.

    The latter has --skip-log-interval.
    """
    options = {"save_interval": 1, "skip_drop_path": 0.5}
    parts = arguments(tmp_path / "parts", images, **options, resume=True, skip_log_interval=2)
    out = in_two(arguments(tmp_path / "whole", images, **options), ["dies", *parts], parts)
    draws = [line.split()[1:] for line in out.splitlines() if line.startswith("draws")][:6]
    assert len({number for pair in draws for number in pair}) == 12
    assert "resuming from iteration 3" in out
    assert_same_run(tmp_path / "whole" / "seed1", tmp_path / "parts" / "seed1")
    assert skip_lines(tmp_path / "parts" / "seed1" / "skips.jsonl").keys() == {2, 4, 6}
