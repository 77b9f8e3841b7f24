"""benchmarks/gpu.py: its parts, what it refuses, and a table that names the machine in every row."""

import csv
import json
import shlex
from argparse import Namespace

import pytest
import torch

from benchmarks import gpu
from fairseq_rskip.tools.experiments.main import parse

SPEEDS = ["operator-fp16", "operator-bf16", "operator-fp32"]
SPEEDS += ["transformer-fp16", "transformer-bf16", "resnet-fp16", "resnet-bf16"]


def test_every_part_is_listed_with_its_command(capsys, tmp_path):
    assert gpu.main(["--list", "--output", str(tmp_path / "out"), "--cifar10", "my images"]) == 0
    commands = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert list(commands) == ["tests", *SPEEDS, "translation", "images"]
    for name in ("translation", "images"):
        words = shlex.split(commands[name])
        assert words[2] == "fairseq_rskip.tools" and parse(words[3:], None).tables == [f"experiments/gpu-{name}.yaml"]
    assert words[-2:] == ["--corpus", "my images"]


@pytest.mark.parametrize(("words", "named"), [(["opperator"], "opperator"), (["tests"], "--dry-run")])
def test_what_cannot_run_is_refused(words, named, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: named != "--dry-run")
    assert gpu.main([*words, "--output", str(tmp_path)]) == 1
    assert named in capsys.readouterr().err


def test_a_part_runs_at_toy_size(capsys):
    assert gpu.main(["--dry-run", "resnet-bf16"]) == 0
    assert "resnet_bf16.csv" in capsys.readouterr().out


def test_every_training_is_a_row_with_its_machine(tmp_path):
    for seed, record in ((1, {"metrics": {"seconds": 9.5, "values": {"error": 7.2}}}), (2, {})):
        folder = tmp_path / "images" / "runs" / "resnet" / f"seed{seed}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(record))
    gpu.collect("images", Namespace(output=tmp_path, dry_run=True))
    with open(tmp_path / "images.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["seed"], row["error"]) for row in rows] == [("seed1", "7.2"), ("seed2", "")]
    assert all(row["device"] and row["torch"] == torch.__version__ for row in rows)
