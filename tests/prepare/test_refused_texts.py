"""Files and folders that data preparation refuses, in one line that says what it accepts."""

import os
import shutil
import signal

import pytest

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import cache_folder
from fairseq_rskip.tools.prepare import main
from fairseq_rskip.tools.prepare import text as steps
from fairseq_rskip.tools.prepare.archives import read_list
from fairseq_rskip.tools.prepare.stages import Stages


@pytest.fixture
def pairs(tmp_path):
    """The words of a command that prepares six small files, FOLDER left out."""
    words = ["--src", "en", "--tgt", "de", "--bpe", "none"]
    for split in ("train", "valid", "test"):
        for side in ("src", "tgt"):
            path = tmp_path / f"{split}-{side}"
            path.write_text(f"a line of {split} {side}\n")
            words += [f"--{split}-{side}", str(path)]
    return words


def refused(capsys, *words):
    """The command's only line of errors."""
    assert main.main([*map(str, words)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_pipe_is_refused_before_it_is_read(pairs, tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    line = refused(capsys, *pairs, "--train-src", pipe, tmp_path / "out")
    assert line == f"error: --train-src: {pipe} is a pipe or a device"


def test_a_folder_is_no_side_of_a_pair(pairs, tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("a line\n")
    line = refused(capsys, *pairs, "--train-src", tmp_path / "texts", tmp_path / "out")
    assert line == f"error: --train-src: {tmp_path / 'texts'} is a folder"


@pytest.mark.parametrize("name", ["", "prepared"])
def test_a_folder_of_text_is_not_prepared_into_itself(tmp_path, capsys, name):
    """The dictionary in it would be a text of the next call."""
    (tmp_path / "one.txt").write_text("a line\n")
    line = refused(capsys, "--text", tmp_path, tmp_path / name)
    assert "expected a FOLDER outside of it" in line
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]


def test_a_folder_whose_name_is_not_utf8_is_refused(pairs, tmp_path, capsys):
    line = refused(capsys, *pairs, os.fsdecode(bytes(tmp_path) + b"/o\xff"))
    assert line.endswith(r"/o\udcff': expected a name in UTF-8")


def test_a_list_of_archives_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "list.tsv").write_bytes(b"caf\xe9\n")
    with pytest.raises(UserError, match="list.tsv is no UTF-8 text"):
        read_list(tmp_path / "list.tsv")


@pytest.mark.parametrize(
    ("documents", "advice"),
    [(10, "give a smaller --held-out than 0.49"), (1, "put a blank line after each")],
)
def test_too_few_documents_for_the_training_are_said_with_what_to_do(tmp_path, documents, advice):
    path = tmp_path / "text"
    path.write_text("a line\n\n" * documents)
    targets = [tmp_path / split for split in ("train", "valid", "test")]
    with pytest.raises(UserError, match=advice):
        steps.draw_documents(path, targets, held_out=0.49)


def test_too_few_files_of_a_folder_are_said_with_what_to_do(tmp_path):
    (tmp_path / "one.txt").write_text("a line\n")
    targets = [tmp_path / split for split in ("train", "valid", "test")]
    with pytest.raises(UserError, match="every file is a document, so add files"):
        steps.draw_documents(tmp_path, targets, held_out=0.05)


def kill_this_process():
    """In place of an encoder: the system ends the worker, as it does where memory is short."""

    def kill(line):
        os.kill(os.getpid(), signal.SIGKILL)

    return kill


def test_a_killed_worker_is_one_line():
    with (
        pytest.raises(UserError, match="out of memory: give a smaller --workers"),
        steps.mapper(kill_this_process, (), 2) as mapped,
    ):
        list(mapped(["a line"]))


def test_a_stage_that_was_moved_to_another_disk_is_made_again(tmp_path):
    """A link is in its place; what it leads to is left alone."""
    Stages("mine", tmp_path, "one").make("raw", lambda part: (part / "text").write_text("old"))
    shutil.move(tmp_path / "raw", tmp_path / "elsewhere")
    (tmp_path / "raw").symlink_to(tmp_path / "elsewhere")
    Stages("mine", tmp_path, "two").make("raw", lambda part: (part / "text").write_text("new"))
    assert not (tmp_path / "raw").is_symlink()
    assert (tmp_path / "raw" / "text").read_text() == "new"
    assert (tmp_path / "elsewhere" / "text").read_text() == "old"
    assert not (tmp_path / ".raw.replaced").exists()


def test_what_is_built_once_needs_a_home_or_a_folder(monkeypatch, tmp_path):
    for variable in ("HOME", "XDG_CACHE_HOME", "RSKIP_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # a user that is in no list
    with pytest.raises(UserError, match="no home folder .*: set RSKIP_CACHE"):
        cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fairseq_rskip"
    monkeypatch.setenv("RSKIP_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
