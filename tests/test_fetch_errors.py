"""data-prep/fetch.py: every way to fail is one line, and nothing false gets an archive's name."""

# ruff: noqa: F811  (fixtures are imported by name)

import os
import shutil
from pathlib import Path

import pytest
from conftest import run_command
from fetch_helpers import DATA, FALSE, SCRIPT, SHA, SIZE, place, server  # noqa: F401
from loopback import WEB_PAGE, Answer, Loopback

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(status=404), ["HTTP 404"]),
        (Answer(status=500), ["HTTP 500"]),
        (Answer(DATA, drop_at=1000), ["truncated: the connection was closed after 1,000 of", "1,000 bytes kept"]),
        (Answer(DATA, stall_at=0), ["stalled: next to no data for 1 s"]),
        (Answer(DATA[:5000]), [f"truncated: 5,000 bytes, expected {SIZE:,}", "kept aside as a.gz.bad"]),
        (Answer(DATA + b"1"), [f"{SIZE + 1:,} bytes, expected {SIZE:,}"]),
        (
            Answer(FALSE),
            ["wrong checksum: expected " + SHA + ", got sha256:", "kept aside as a.gz.bad"],
        ),
        (Answer(WEB_PAGE), ["a web page (HTML) in place of the archive"]),
    ],
    ids=["404", "500", "drop", "stall", "short", "long", "checksum", "html"],
)
def test_what_a_server_did_is_said(server, place, answer, words):
    server.answers["/a.gz"] = answer
    place.row(server.url("none.gz"), server.url("a.gz"))
    error = place.fails()
    assert f"cannot fetch a.gz: {server.url('none.gz')}: HTTP 404; {server.url('a.gz')}: " in error
    assert all(word in error for word in words), error


@pytest.mark.parametrize("body", [WEB_PAGE, b"", b'{"error": "not here"}'], ids=["html", "empty", "json"])
def test_what_is_no_archive_is_never_recorded(server, place, body):
    server.answers["/a.gz"] = Answer(body)
    place.row(server.url("a.gz"), size="-", checksum="-")
    assert "in place of the archive" in place.fails() and not place.lock.exists()


def test_connection_refused(place):
    with Loopback() as server:
        url = server.url("a.gz")
    place.row(url, size="-")
    assert "127.0.0.1" in place.fails()


def test_no_space(server, place, monkeypatch):
    server.answers["/a.gz"] = Answer(DATA)
    place.row(server.url("a.gz"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 100_000))
    assert "no space in" in place.fails() and server.requests == []
    place.list.unlink()
    place.row(server.url("a.gz"), size="-", checksum="-")
    assert "0.3 MB needed, 0.1 MB free" in place.fails() and server.gets("a.gz") == []
    place.row(server.url("a.gz"), name="b.gz", size=60_000)
    place.row(server.url("a.gz"), name="c.gz", size=60_000)
    assert "0.1 MB needed" in place.fails() and len(server.requests) == 1, "all that is listed must fit"


def test_a_disk_that_fills_up(server, place):
    """A limit on the size of files stands for the disk: the write itself fails."""
    server.answers["/a.gz"] = Answer(DATA)
    place.row(server.url("a.gz"))
    done = run_command(["bash", "-c", 'ulimit -f 100; exec "$@"', "-", "python", SCRIPT, place.list, place.folder])
    assert done.returncode == 1 and done.stderr == f"error: {place.folder}: File too large\n"
    assert place.fetch()[0] == 0 and place.files() == {"a.gz": DATA}


def test_no_curl(server, place, monkeypatch):
    place.row(server.url("a.gz"))
    monkeypatch.setenv("PATH", str(place.root))
    assert "curl is not installed" in place.fails()


def test_a_folder_that_cannot_be_written(server, place, monkeypatch):
    place.row(server.url("a.gz"))
    place.folder.write_text("a file")
    assert str(place.folder) in place.fails()
    place.folder.unlink()
    place.folder.mkdir(mode=0o555)
    if os.geteuid() == 0:  # root may write anywhere: stand in for the kernel's refusal
        monkeypatch.setattr(Path, "touch", lambda path: os.open(f"/proc/{path.name}", os.O_CREAT | os.O_WRONLY))
    assert "a.gz.part: " in place.fails()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("a.gz 10 - http://x/", "line 2: 1 column where at least 4 are needed: name, size or -, checksum or -, URL(s)"),
        ("a.gz\tten\t-\thttp://x/", "'ten' is neither a number of bytes nor '-'"),
        ("a.gz\t1\tsha1:00\thttp://x/", "'sha1:00' is none of sha256:<64 hex digits>"),
        ("a.gz\t1\tsha256:00\thttp://x/", "'sha256:00' is none of"),
        ("../a.gz\t1\t-\thttp://x/", "'../a.gz' cannot be a file's name"),
        ("sub/a.gz\t1\t-\thttp://x/", "'sub/a.gz' cannot be a file's name"),
        ("a.gz\t1\t-\thtp://x/", "'htp://x/' is not an http://"),
        ("a.gz\t1\t-\t-oProxyCommand", "'-oProxyCommand' is not an http://"),
        ("b.gz\t1\t-\thttp://x/\nb.gz\t1\t-\thttp://x/", "line 3: b.gz is listed twice"),
        ("", "lists no archive"),
    ],
)
def test_a_malformed_list(place, row, words):
    place.list.write_text(f"# name\tsize\n{row}\n", encoding="utf-8")
    error = place.fetch()
    assert error[0] == 1 and words in error[2] and len(error[2].splitlines()) == 1


def test_a_malformed_lock_and_no_list(place):
    assert "list.tsv: No such file" in place.fetch()[2]
    place.row("http://x/")
    place.lock.write_text("a.gz sha256\n")
    assert "checksums.lock line 1 is malformed" in place.fetch()[2]
