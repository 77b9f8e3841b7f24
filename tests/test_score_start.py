"""scripts/score.py as a program: without its packages, and into a pipe that nobody reads."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, run_command

SCORE = ROOT / "scripts" / "score.py"


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """score.py in a project of its own, for a Python without packages; returns the command."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    return [sys.executable, "-S", tmp_path / "scripts" / "score.py", "--hyp", "a b"]


def test_without_its_packages_it_says_so(bare):
    done = run_command(bare)
    assert done.returncode == 1
    assert done.stderr.startswith("error: sacrebleu is not installed; scripts/setup_env.sh ")
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert os.access(SCORE, os.X_OK)


def test_the_projects_environment_is_found_unless_another_is_active(bare):
    python = bare[2].parent.parent / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    python.chmod(0o755)
    assert run_command(bare).stdout == f"{bare[2]}|--hyp|a b|"
    assert "not installed" in run_command(bare, env={"VIRTUAL_ENV": "/x"}).stderr


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    out = tmp_path / "scores.json"
    text = tmp_path / "text"
    text.write_text("a b c d\n")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, SCORE, "--hyp", text, "--ref", text, "--json", out]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    assert len(json.loads(out.read_text(encoding="utf-8"))["scores"]) == 4
