"""Small image folders, and runs of train_cifar.py in this process or in one of its own."""

import contextlib
import random
import sys
import tarfile

import torch
from conftest import ROOT, run_command
from PIL import Image

from fairseq_rskip.files import read_json_lines
from fairseq_rskip.vision.main import main
from fairseq_rskip.vision.trainer import Trainer

SCRIPT = ROOT / "scripts" / "train_cifar.py"
CLASSES = ("cat", "dog", "Vịt")


def write_image(path, seed, size=(32, 32), mode="RGB"):
    """Random pixels as ``path``; returns their bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.frombytes(
        "RGB", size, random.Random(seed).randbytes(size[0] * size[1] * 3)
    ).convert(mode)
    image.save(path)
    return image.convert("RGB").tobytes()


def write_folder(path, per_class=4, classes=CLASSES, splits=("train", "test")):
    """An image folder of PNGs; returns ``path``."""
    for split in splits:
        for c, name in enumerate(classes):
            for k in range(per_class):
                write_image(path / split / name / f"{k}.png", seed=f"{split}{c}{k}")
    return path


def pack(folder, archive, name=None):
    """A gzipped tar of ``folder``, under its own name or ``name``."""
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=name or folder.name)
    return archive


def arguments(output, data, more=(), **options):
    """Return the arguments of a run that takes a second.

    Unless ``options`` say else it has depth 8 and 6 iterations of 8 images on one CPU thread.
    """
    options = {
        "depth": 8,
        "iterations": 6,
        "batch_size": 8,
        "warmup_iterations": 1,
        "device": "cpu",
        **options,
    }
    argv = ["--data", data, "--output", output, "--cache", output.parent / "cache"]
    for name, value in options.items():
        values = [] if value is True else value if isinstance(value, (list, tuple)) else [value]
        argv += [f"--{name.replace('_', '-')}", *values]
    return [str(item) for item in [*argv, *more]]


def train(capfd, output, data, **options):
    """Call ``main`` in this process and return (exit status, stdout, stderr).

    Where ``capfd`` is None it returns the exit status alone.
    """
    if capfd is not None:
        capfd.readouterr()
    try:
        status = main(arguments(output, data, **options))
    except SystemExit as end:
        status = end.code
    return (status, *capfd.readouterr()) if capfd is not None else (status,)


def refused(result):
    """The only line of a run that ended with status 1."""
    assert result[0] == 1
    return error_line(result[2])


def train_process(output, data, timeout=120, env=None, **options):
    """``scripts/train_cifar.py`` in a process of its own."""
    return run_command(
        [sys.executable, SCRIPT, *arguments(output, data, **options)], timeout=timeout, env=env
    )


def _interrupt():
    raise KeyboardInterrupt


@contextlib.contextmanager
def stop_at(monkeypatch, iteration, stop=_interrupt):
    """Call ``stop()`` in the block when a run has done ``iteration`` iterations.

    ``stop`` raises unless it says else.
    """
    step = Trainer.train_step

    def stopping(self):
        if self.iteration == iteration:
            stop()
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", stopping)
        yield


def weights(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]


def assert_same_run(a, b):
    """Equal weights and logs, bit for bit."""
    ours, truth = weights(a), weights(b)
    assert ours.keys() == truth.keys() and all(
        torch.equal(ours[name], truth[name]) for name in ours
    )
    assert history(a) == history(b)


def history(folder):
    """The records of a run's log without its timings."""
    records = read_json_lines(folder / "log.jsonl")
    return [
        {k: v for k, v in r.items() if k not in ("seconds", "images_per_second")} for r in records
    ]


def error_line(error):
    """The only line on stderr."""
    (line,) = error.splitlines()
    assert line.startswith("error: ")
    return line[len("error: ") :]
