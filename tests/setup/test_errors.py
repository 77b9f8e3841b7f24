"""Errors in one line: the nearest name, and files that are missing."""

import argparse
import os
import subprocess
import sys

import pytest

from fairseq_rskip import console, files
from fairseq_rskip.errors import UserError, did_you_mean, exit_status
from fairseq_rskip.residual import KINDS
from fairseq_rskip.tools.__main__ import main as rskip
from fairseq_rskip.tools.evaluate.weights import choose

ARCHITECTURES = [
    "transformer",
    "transformer_xskip",
    "transformer_rskip_ln",
    "transformer_lm_rskip_ln",
]


@pytest.mark.parametrize(
    "word, known, expected",
    [
        ("rskp", KINDS, "rskip"),
        ("Rskip", KINDS, "rskip"),
        ("rskip_ln", KINDS, "rskip"),
        ("hyper_connections", KINDS, "hyper"),
        ("rskip", ARCHITECTURES, "transformer_rskip_ln"),
        ("transformer_rskip", ARCHITECTURES, "transformer_rskip_ln"),
        ("transformer_rskp_ln", ARCHITECTURES, "transformer_rskip_ln"),
        ("corpus-de-en", ["corpus-en-fr", "corpus-en-de"], "corpus-en-de"),
        ("--depht", ["--depth", "--width"], "--depth"),
        ("--update", ["--max-update", "--updates-file"], "--max-update"),
        ("recursive", KINDS, ""),
        ("--epochs", ["--depth", "--iterations"], ""),
    ],
)
def test_the_nearest_name_is_suggested(word, known, expected):
    assert did_you_mean(word, known) == (f"did you mean {expected}?" if expected else "")


def test_a_file_of_sentences_behind_the_model_is_refused_with_what_to_type(capsys):
    assert rskip(["translate", "multi30k-en-de-2rskip", "in.txt"]) == 1
    expected = "standard input, rskip translate multi30k-en-de-2rskip < in.txt"
    assert expected in capsys.readouterr().err


def test_a_checkpoint_in_the_place_of_its_folder_is_refused_with_what_to_type(tmp_path):
    checkpoint = tmp_path / "checkpoint_best.pt"
    checkpoint.touch()
    with pytest.raises(UserError, match="training saved to, and --checkpoint checkpoint_best.pt$"):
        choose(checkpoint, 5)


def test_a_missing_file_does_not_exist(capsys, tmp_path):
    assert exit_status((tmp_path / "nothing").read_text) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'nothing'} does not exist\n"


def test_a_file_that_cannot_be_read_is_not_called_one_that_cannot_be_written(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"), files.writing(tmp_path / "new"):
        (tmp_path / "nothing").read_text()
    with pytest.raises(UserError, match="^cannot write .*new: No such file or directory$"):
        files.write_text(tmp_path / "nowhere" / "new", "a text")
    assert not list(tmp_path.iterdir())


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    for number in (1, 2):
        files.append_json(path, {"n": number})
    path.write_text(path.read_text() + '{"n": 3')
    assert files.read_json_lines(path) == [{"n": 1}, {"n": 2}]


def test_a_range_has_its_least_number_unless_it_is_open():
    assert console.between(0, 1)("0") == 0
    for convert, text in (
        (console.between(0, 1, open_below=True), "0"),
        (console.between(0, 1), "1"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a number"):
            convert(text)


def test_letters_that_the_locale_lacks_are_printed_as_escapes():
    code = "from fairseq_rskip.errors import exit_status; exit_status(lambda: print('λ = 2 ± 1'))"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert run.stdout == b"\\u03bb = 2 \\xb1 1\n"


def test_the_time_of_the_first_item_is_not_in_what_is_left(capsys):
    """It loads a model, or starts a program."""
    now = 1000.0
    with console.Progress(100, "translated") as shown:
        shown.bar._time, shown.bar.start_t, shown.bar.last_print_t = lambda: now, now, now
        for seconds in (300.0, 30.0, 30.0):
            now += seconds
            shown.advance()
    lines = capsys.readouterr().err.splitlines()
    assert "1/100" in lines[0] and lines[0].endswith("? left")
    assert "48:30 left" in lines[-1], lines  # 97 of half a minute


@pytest.mark.parametrize(
    "words, said",
    [
        ("prepare --texts my.txt data/mine", "argument --texts; did you mean --text?"),
        ("export --hlaf", "argument --hlaf; did you mean --half?"),
        ("export --half", "required: CHECKPOINT, DIR"),
        ("reproduce run --output runs", "required: TABLE"),
    ],
)
def test_a_misspelled_option_is_named_before_what_it_leaves_missing(words, said, capsys):
    assert rskip(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{said}; -h lists the options" in line
