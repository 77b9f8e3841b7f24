"""The command line: every option, and what it refuses, in one line."""

import re
import sys

import pytest
from conftest import ROOT, run_command
from vision_helpers import error_line, train

from fairseq_rskip.vision.config import Config, parse

BAD = [  # options of the command line -> the error, and the exit status
    ("--depth 21", "--depth 21: expected 6n+2, for example 20", 1),
    ("--skip-lambda 1.5", "--skip-lambda 1.5: expected an integer from 1", 1),
    (
        "--skip-norm batch --skip-norm-axes chw",
        "--skip-norm-axes chw: expected 'c' for BatchNorm",
        1,
    ),
    ("--lr nan", "--lr: 'nan' is not a number", 2),
    (
        "--warmup-iterations 400",
        "--warmup-iterations 400: expected fewer than the first milestone's 3",
        1,
    ),
    ("--train-images 4", "--train-images 4: expected a multiple of 3 (classes) up to 12", 1),
    ("--amp fp16", "--amp fp16 needs a GPU", 1),
    ("--depht 20", "unrecognized argument --depht; did you mean --depth?", 2),
    ("--skip-lamda=2", "unrecognized argument --skip-lamda; did you mean --skip-lambda?", 2),
    (
        "--data mnist",
        "--data mnist: expected one of cifar10, cifar100, digits or imagefolder:PATH",
        1,
    ),
    (
        "--data /",
        "--data /: expected imagefolder:/ for the images in that folder, or one of cifar10, ",
        1,
    ),
    (
        "--skip-kind hyper",
        "--skip-kind hyper: expected a kind for images, which train-cifar --help-skips lists; a "
        "rule of your own needs RSKIP_RULES=FILE (a rule of Transformers alone)",
        1,
    ),
]


@pytest.mark.parametrize("options, message, status", BAD, ids=[row[0] for row in BAD])
def test_bad_options_are_one_line(tmp_path, images, capfd, options, message, status):
    actual, _, error = train(capfd, tmp_path / "run", images, more=options.split())
    assert actual == status and error_line(error).startswith(message)
    assert not (tmp_path / "run").exists()


def test_help_comes_at_once_and_fits_two_pages(tmp_path):
    """Less than a second of processor time: torch is not imported."""
    script = [sys.executable, "-X", "importtime", ROOT / "scripts" / "train_cifar.py"]
    done = run_command([*script, "--help"], env={"COLUMNS": "80"})
    assert done.returncode == 0 and len(done.stdout.splitlines()) <= 100
    assert done.stdout.startswith("usage: train_cifar.py [options]\n")
    assert not re.search(r"\| +(torch|numpy)$", done.stderr, re.M)


def test_every_option_has_a_help_text_and_reaches_the_dataclass(capsys):
    for words in (["-h"], ["--help-skips"]):
        with pytest.raises(SystemExit):
            parse(words)
    text = capsys.readouterr().out
    assert all(
        f"--{name.replace('_', '-')}" in text.replace("--no-", "--") for name in Config().as_dict()
    )
    config = parse(
        ["--no-flip", "--milestones", "7", "9", "--skip-lambda", "3", "--warmup-iterations", "1"]
    )
    assert (config.flip, config.milestones, config.skip_lambda, config.compile) == (
        False,
        (7, 9),
        3.0,
        False,
    )


def test_every_row_of_the_papers_tables_is_a_command():
    text = (ROOT / "docs" / "cifar.md").read_text("utf-8")
    built = {}
    for name, line in re.findall(
        r"^\| ([^|]+?) \| (?:Table|section) [^|]*\|[^|]*\| `(--[^`]+)` \|$", text, re.M
    ):
        config = parse(line.split())
        skip = config.skip_options()
        built[name] = (
            config.data,
            *(skip.get(key) for key in ("kind", "skip_lambda", "norm", "branch_scale", "init")),
        )
    assert len(built) == len(set(built.values())) == 21
    assert built["LN(x + 3F)"] == ("cifar10", "xskip", 1.0, "layer", 3.0, None)
    assert built["2rSkip+BN"] == ("cifar10", "rskip", 2.0, "batch", 1.0, None)
    assert built["wSkip+LN, w from 2"] == ("cifar10", "wskip", None, "layer", 1.0, 2.0)
