"""A stopped training continues as it began, or says why it cannot."""

import os
import re
import subprocess
import sys
from argparse import Namespace

import pytest
import torch
from conftest import ROOT, run_command
from fairseq.logging.progress_bar import SummaryWriter
from processes import wait_for
from training_corpus import LITTLE, SCRIPT, STARTING, TINY, lengthen, planner, prepare

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.__main__ import main
from fairseq_rskip.tools.train.main import read
from fairseq_rskip.tools.train.plan import make_plan
from fairseq_rskip.tools.train.run import Progress
from fairseq_rskip.tools.train.saved import SavedTraining
from fairseq_rskip.tools.training_files import LAST


@pytest.mark.slow
def test_training_is_killed_resumes_and_ends(tiny_corpus, tmp_path, capsys):
    data, save = prepare(tiny_corpus, tmp_path), tmp_path / "gespeichert in ö"
    argv = [data, TINY, *LITTLE, "--save-dir", save]
    command = planner(capsys)(*argv, "--max-epoch", "500", "--dry-run").words
    command = [
        sys.executable,
        "-m",
        "fairseq_rskip.tools.train.run",
        str(save),
        "about",
        "fairseq-train",
        *command,
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": ROOT}
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet) as process:
        wait_for((save / "checkpoint2.pt").exists, process)
        process.kill()  # fairseq-train ends with it, and gives the folder free
    (save / "checkpoint_last.pt.part").touch()
    lengthen(data / "data-bin" / "valid.src-tgt.src", 10, 3001)  # which ends nothing either
    done = run_command([SCRIPT, *argv, "--max-update", 60])
    assert done.returncode == 0, done.stderr
    assert (
        "Loaded checkpoint" in done.stdout
        and f"--arch {TINY}" in done.stdout
        and "| INFO |" not in done.stdout
    )
    first, slow = done.stderr.splitlines()
    assert first == STARTING and "slow" in slow
    assert (
        "warning: 1 sentence is longer than --max-tokens or the model's positions and left out\n"
        in done.stdout
    )
    log = (save / "train.log").read_text("utf-8")
    assert log.startswith("about\n") and log.count("tokens per step: ") == 1 and "| INFO |" in log
    for name in ("dict.src.txt", "dict.tgt.txt", "preparation.json"):
        assert (save / name).read_bytes() == (data / "data-bin" / name).read_bytes()
    assert 5 <= len([path for path in save.iterdir() if path.stem[10:].isdigit()]) <= 10
    assert (save / "tensorboard").is_dir() == bool(SummaryWriter) and not list(save.glob("*.part"))
    plan = make_plan(*read([*map(str, argv), "--max-update", "70", "--lr", "0.5"]))
    (warning,) = plan.changes()
    assert re.search(r" had lr \[?[\d.]+\]?, now \[0.5\]; another --save-dir", warning), warning
    same = make_plan(*read([*map(str, argv), "--max-update", "70"]))
    assert same.changes() == []
    (warning,) = same._replace(warm_up=14, settings={}).changes()  # the recipe's, as it is longer
    assert " had warmup-updates 10, now 14; another" in warning
    assert warning.endswith(", --warmup-updates 10 keeps its schedule")
    assert (
        main(["train", *map(str, argv), "--max-update", "60"]) == 0
        and "all 60 updates" in capsys.readouterr().err
    )
    for other, said in {
        "--skip-lambda 3": "skip-lambda 2, not 3",
        "--seed 7": "seed 1, not 7",
        "--optimizer sgd": "optimizer adam, not sgd",
        "--lr-scheduler fixed": "lr-scheduler inverse_sqrt, not fixed",
        "--criterion cross_entropy": "criterion label_smoothed_cross_entropy, not cross_entropy",
        "--max-tokens 500": "max-tokens 600, not 500",
        "--truncate-source": "truncate-source False, not True",
    }.items():
        words = [*map(str, argv), "--max-update", "60", *other.split()]
        assert main(["train", *words]) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: {save} has a finished training with {said}; ")


@pytest.mark.parametrize(("given", "refused"), [(2.0, True), (1.0, False), (None, True)])
def test_a_training_keeps_the_initial_values_that_it_began_with(tmp_path, given, refused):
    """Otherwise a checkpoint would say later that it began with the new ones; None is the default.

    What matters in training only may change.
    """
    model = {"_name": "transformer_mhc", "skip_kind": "mhc", "skip_read_bias": 1.0}
    torch.save(
        {"cfg": {"model": {**model, "skip_norm": "layer", "skip_drop_path": 0.0}}}, tmp_path / LAST
    )
    asked = {"skip-kind": "mhc", "skip-read-bias": given, "skip-drop-path": 0.1}
    saved = SavedTraining(tmp_path)
    assert ("skip-drop-path", 0.0, 0.1) in saved.differences(asked)
    if not refused:
        saved.check_start(asked)
        return
    with pytest.raises(UserError, match=r"^--skip-read-bias [24].0: the training in .* with 1.0,"):
        saved.check_start(asked)
    saved.check_start({**asked, "skip-norm": "rms"})  # the checkpoint refuses that itself


def test_a_training_keeps_its_equation(tmp_path):
    model = {"_name": "transformer_rskip_ln", "skip_kind": "rskip", "skip_lambda": 2.0}
    torch.save({"cfg": {"model": {**model, "skip_norm": "layer"}}}, tmp_path / LAST)
    saved = SavedTraining(tmp_path)
    saved.check_start({"skip-kind": "rskip", "skip-lambda": 2})
    with pytest.raises(UserError, match=r"^--skip-lambda 3: the training in .* has 2.0; "):
        saved.check_start({"skip-kind": "rskip", "skip-lambda": 3})


def test_a_training_keeps_the_model_that_it_began_with(tmp_path):
    parent = tmp_path / "parent.pt"
    asked = {"finetune-from-model": str(parent)}
    torch.save({"cfg": {"checkpoint": {"finetune_from_model": None}}}, tmp_path / LAST)
    with pytest.raises(UserError, match="the training in .* began without it; another --save-dir"):
        SavedTraining(tmp_path).check_start(asked)
    with pytest.raises(UserError, match="has a finished training without finetune-from-model, not"):
        SavedTraining(tmp_path).check_settings(asked)
    torch.save({"cfg": {"checkpoint": {"finetune_from_model": str(parent)}}}, tmp_path / LAST)
    SavedTraining(tmp_path).check_start(asked)
    with pytest.raises(UserError, match="--finetune-from-model other.pt: .* began with /"):
        SavedTraining(tmp_path).check_start({"finetune-from-model": "other.pt"})


def test_a_resumed_training_has_ended_by_the_updates_of_its_last_part(tmp_path):
    history = [{"num_updates": 50}, {"num_updates": 100}]
    cfg = {"model": {"_name": "transformer"}, "distributed_training": {"distributed_world_size": 1}}
    torch.save({"cfg": cfg, "optimizer_history": history}, tmp_path / LAST)
    saved = SavedTraining(tmp_path)
    assert saved.why_ended(100, "updates", 0).endswith("has all 100 updates: nothing to train")
    assert saved.why_ended(101, "updates", 0) == ""
    processes = ("distributed-world-size", 1, 2)
    assert saved.differences({"distributed-world-size": 2}) == [processes]


def test_settings_of_fairseqs_older_classes_are_compared_too(tmp_path):
    """Theirs are a Namespace where others have a mapping."""
    cfg = {
        "model": Namespace(_name="transformer_tiny", dropout=0.1),
        "task": Namespace(_name="translation_multi_simple_epoch", langs="a,b"),
        "optimizer": {"_name": "adam"},
        "lr_scheduler": None,
    }
    torch.save({"cfg": cfg}, tmp_path / LAST)
    asked = {"arch": "transformer_tiny", "dropout": 0.3, "langs": "a,b", "optimizer": "sgd"}
    assert SavedTraining(tmp_path).differences({**asked, "task": "translation"}) == [
        ("dropout", 0.1, 0.3),
        ("optimizer", "adam", "sgd"),
        ("task", "translation_multi_simple_epoch", "translation"),
    ]


def test_a_stop_names_the_updates_of_the_checkpoint(capsys):
    """Not those of the last line: what came after the checkpoint is trained again."""
    progress = Progress()
    for line in (
        "Loaded checkpoint c/checkpoint_last.pt (epoch 2 @ 8 updates)",
        "Saved checkpoint c/checkpoint_last.pt (epoch 3 @ 16 updates, score 8.1)",
    ):
        progress.read(f"2026-01-01 00:00:00 | INFO | fairseq.trainer | {line}\n".encode())
    assert progress.saved == "16"
    assert capsys.readouterr().out.splitlines() == [
        "Loaded checkpoint c/checkpoint_last.pt (epoch 2 @ 8 updates)"
    ]


def test_a_saved_default_equals_the_same_value_that_is_asked_for(tmp_path):
    model = {"_name": "transformer_mhc", "skip_kind": "mhc", "skip_read_bias": None}
    torch.save({"cfg": {"model": model}}, tmp_path / LAST)
    asked = {"skip-kind": "mhc", "skip-read-bias": 4.0}  # 4 is mhc's default
    assert SavedTraining(tmp_path).differences(asked) == []
