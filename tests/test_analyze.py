"""scripts/analyze.py itself: its help, and how everything that goes wrong becomes one line."""

import subprocess
import sys
import types

import analyze
import pytest
from conftest import ROOT, run_command

SCRIPT = ROOT / "scripts" / "analyze.py"
NAMES = ["gradients", "ratio", "depth", "curves"]


def exits(capfd, *arguments):
    """(status, stdout, stderr) of a command line that argparse ends."""
    with pytest.raises(SystemExit) as ended:
        analyze.main(list(arguments))
    return (ended.value.code, *capfd.readouterr())


def test_help_has_one_line_for_each(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, said, _ = exits(capfd, "-h")
    listed = [line.split()[0] for line in said.splitlines() if line.startswith("    ")]
    assert status == 0 and listed == NAMES  # a wrapped line would be listed, too
    for name in NAMES:
        assert (ROOT / "scripts" / "analysing" / f"{name}.py").is_file()


@pytest.mark.parametrize("name", NAMES)
def test_each_says_what_it_does(capfd, name):
    module = __import__(f"analysing.{name}", fromlist=["run"])
    status, said, _ = exits(capfd, name, "-h")
    assert status == 0 and module.__doc__.splitlines()[0] in said and "--output" in said


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required"),
        (["gradient"], "invalid choice: 'gradient'"),
        (["depth", "--output", "x", "--bla"], "unrecognized arguments: --bla"),
        (["depth", "--output", "x", "--blocks", "many"], "argument --blocks: invalid int value: 'many'"),
        (["curves", "run"], "the following arguments are required: --output"),
    ],
)
def test_a_wrong_command_line_is_one_line(capfd, arguments, message):
    status, said, error = exits(capfd, *arguments)
    assert (status, said) == (2, "")
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "error, status, line",
    [
        (FileNotFoundError(2, "No such file or directory", "runs/x"), 1, "runs/x: No such file or directory"),
        (OSError("the network is gone"), 1, "the network is gone"),
        (ModuleNotFoundError("No module named 'sofa'", name="sofa"), 1, "this needs the Python package sofa, which is"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_goes_wrong_is_one_line(capfd, monkeypatch, error, status, line):
    def fail(_options):
        raise error

    stub = types.SimpleNamespace(__doc__="", add_arguments=lambda parser: None, run=fail)
    monkeypatch.setitem(sys.modules, "analysing.curves", stub)
    assert analyze.main(["curves"]) == status
    said, error = capfd.readouterr()
    assert said == "" and error.startswith(f"error: {line}") and error.count("\n") == 1


@pytest.mark.slow
def test_a_subcommand_imports_what_it_needs_and_no_more(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise ImportError('not installed')")
    (tmp_path / "fairseq.py").write_text("raise ImportError('not installed')")
    done = run_command([sys.executable, SCRIPT, "curves", tmp_path, "--output", tmp_path / "x"], cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert (
        done.stderr
        == f"error: {tmp_path} holds no log: expected log.jsonl of train_cifar.py or train.log of fairseq-train\n"
    )


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    command = [sys.executable, str(SCRIPT), "depth", "--output", str(tmp_path / "d"), "--blocks", "2", "--seeds", "1"]
    process = subprocess.Popen([*command, "--dim", "4"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (141, "")
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".pdf", ".csv"}
