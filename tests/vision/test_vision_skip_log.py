"""--skip-log-interval in train_cifar.py: what is written, and that training does not notice."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from conftest import skip_lines
from vision_helpers import assert_same_run, stop_at, train

from fairseq_rskip.analysis.probe import SkipProbe
from fairseq_rskip.ops import dispatch
from fairseq_rskip.vision.config import Config
from fairseq_rskip.vision.data import load
from fairseq_rskip.vision.trainer import Group, Trainer

PROBED = ("ratio", "f_over_x", "bf_over_ax", "y_grad_norm")
QUANTITIES = ("skip_x_to_F", "skip_F_over_x", "skip_bF_over_ax", "skip_grad_norm")
BLOCKS = [f"blocks.{k}.skip" for k in range(3)]  # of depth 8
GROUP = Group(0, 1, torch.device("cpu"))


@pytest.fixture
def config(images, tmp_path):
    return Config(
        data=images,
        cache=str(tmp_path),
        depth=8,
        batch_size=8,
        iterations=6,
        warmup_iterations=1,
        skip_log_interval=3,
    )


def probed(config, updates, name):
    """Return the figures of a block at update number ``updates`` + 1, of a run without a log.

    Each image is measured by its own loss.
    """
    trainer = Trainer(config, 1, load(config), GROUP)
    for _ in range(updates):
        trainer.train_step()
    batch, images = trainer.stream.next(), trainer.images
    with SkipProbe(trainer.module, dtype=torch.float64) as probe:
        logits = trainer.module(trainer.augmenter.train(images.train_images, batch))
        F.cross_entropy(logits, images.train_labels[batch.index], reduction="sum").backward()
    measured = probe.values(name)
    return [float(measured[name].mean()) for name in PROBED]


def test_the_figures_are_those_of_the_probe(config, images, tmp_path, capfd):
    status, _, error = train(capfd, tmp_path / "run", images, skip_log_interval=3)
    assert (status, error) == (0, "")
    logged = skip_lines(tmp_path / "run" / "seed1" / "skips.jsonl")
    assert logged.keys() == {3, 6}
    assert logged[3].keys() == {f"{quantity}/{name}" for quantity in QUANTITIES for name in BLOCKS}
    for quantity, value in zip(QUANTITIES, probed(config, 5, BLOCKS[1])):
        assert logged[6][f"{quantity}/{BLOCKS[1]}"] == pytest.approx(value, rel=1e-4)


def test_the_coefficients_are_those_that_the_ratio_is_of(tmp_path, images, capfd):
    """Of ReZero's first forward pass: its weights are 0, and x:F has no value."""
    options = {"skip_log_interval": 1, "skip_kind": "rezero", "skip_norm": "none"}
    assert train(capfd, tmp_path / "run", images, warmup_iterations=0, **options)[0] == 0
    first, second, *_ = skip_lines(tmp_path / "run" / "seed1" / "skips.jsonl").values()
    for name in BLOCKS:
        weight, ratio = f"skip_learned/{name}.weight", f"skip_x_to_F/{name}"
        assert first[weight] == 0 and ratio not in first
        assert second[ratio] == pytest.approx(1 / second[weight])


def test_training_is_the_same_bit_for_bit(tmp_path, images, capfd):
    for interval in (0, 1):
        assert (
            train(
                capfd,
                tmp_path / f"every {interval}",
                images,
                skip_log_interval=interval,
                skip_norm="batch",
            )[0]
            == 0
        )
    a, b = (tmp_path / f"every {interval}" for interval in (0, 1))
    assert_same_run(a / "seed1", b / "seed1")
    assert (
        not (a / "seed1" / "skips.jsonl").exists()
        and len(skip_lines(b / "seed1" / "skips.jsonl")) == 6
    )


def test_a_run_waits_for_the_operator_and_never_changes_it(tmp_path, images, capfd, monkeypatch):
    """An operator that the background had built would take over within a run.

    It would have other last bits.
    """
    waits = []
    monkeypatch.setattr(dispatch, "_backends", {})
    monkeypatch.setattr(
        dispatch,
        "_choose",
        lambda _device, wait: waits.append(wait) or dispatch.Backend("torch", "a test"),
    )
    assert train(capfd, tmp_path / "run", images)[0] == 0
    assert waits == [True]


def test_resume_with_another_interval_forgets_only_what_it_does_again(
    tmp_path, images, capfd, monkeypatch
):
    """Killed after iteration 5, the run resumes from 4.

    What the first part logged at 5 is void, 4 stays, in mid-epoch too.
    """
    options = {"save_interval": 4, "batch_size": 4, "iterations": 8, "train_images": 12}
    with stop_at(monkeypatch, 5):
        assert train(capfd, tmp_path / "run", images, skip_log_interval=1, **options)[0] == 130
    log = tmp_path / "run" / "seed1" / "skips.jsonl"
    assert skip_lines(log).keys() == {1, 2, 3, 4, 5}
    assert (
        train(capfd, tmp_path / "run", images, skip_log_interval=7, resume=True, **options)[0] == 0
    )
    assert skip_lines(log).keys() == {1, 2, 3, 4, 7}


def test_compiled_networks_are_measured_uncompiled(config, monkeypatch):
    """torch.compile's code calls no hooks.

    A stand-in that cannot be watched shows that it is not asked.
    """
    monkeypatch.setattr(
        torch, "compile", lambda module: lambda x: module(x).detach().requires_grad_()
    )
    compiled = dataclasses.replace(config, compile=True, skip_log_interval=1)
    trainer = Trainer(compiled, 1, load(compiled), GROUP)
    trainer.train_step()
    assert len(trainer.skips) == 12 and trainer.skips["skip_grad_norm/blocks.0.skip"] > 0


def test_the_scale_of_fp16_does_not_enter_and_an_overflow_is_not_logged(config, monkeypatch):
    actual = []
    for scale in (1.0, 1024.0, float("inf")):
        trainer = Trainer(dataclasses.replace(config, skip_log_interval=1), 1, load(config), GROUP)
        monkeypatch.setattr(trainer.scaler, "scale", lambda loss, scale=scale: loss * scale)
        monkeypatch.setattr(trainer.scaler, "get_scale", lambda scale=scale: scale)
        trainer.train_step()
        actual.append(trainer.skips)
    assert (
        actual[0] == pytest.approx(actual[1], rel=1e-5) and len(actual[0]) == 12 and actual[2] == {}
    )
