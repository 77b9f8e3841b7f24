"""Archives over a loopback server: what is fetched, checked and resumed, and every way to fail in one line."""

import gzip
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, run_command
from loopback import WEB_PAGE, Answer, Loopback

from fairseq_rskip.errors import exit_status
from fairseq_rskip.tools.prepare import fetch

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

DATA = gzip.compress(random.Random(1).randbytes(300_000))
OTHER = gzip.compress(random.Random(2).randbytes(300_000))
FALSE = OTHER[:-8] + DATA[-8:]  # of the right size
SIZE, SHA = len(DATA), "sha256:" + hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def server():
    with Loopback() as server:
        yield server


class Place:
    """A list and a folder to fetch into, with a space and letters beyond ASCII in their paths."""

    def __init__(self, root, capsys):
        self.root = root / "dữ liệu é"
        self.root.mkdir()
        self.list, self.folder, self._capsys = self.root / "list.tsv", self.root / "ar chives", capsys

    def row(self, *urls, name="a.gz", size=SIZE, checksum=SHA):
        with open(self.list, "a", encoding="utf-8") as file:
            file.write("\t".join([name, str(size), checksum, *urls]) + "\n")

    def begun(self, part):
        self.folder.mkdir()
        (self.folder / "a.gz.part").write_bytes(part)

    def fetch(self, *options):
        """Exit status, stdout, stderr."""
        self._capsys.readouterr()
        status = exit_status(lambda: fetch.main([str(self.list), str(self.folder), *map(str, options)]))
        return (status, *self._capsys.readouterr())

    def fails(self, *options):
        """The one line on stderr of a run that must fail."""
        status, _, error = self.fetch(*options)
        assert status == 1 and error.startswith("error: ") and len(error.splitlines()) == 1, error
        assert not (self.folder / "a.gz").exists()
        return error

    def files(self):
        return {path.name: path.read_bytes() for path in self.folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture
def place(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fetch, "RETRY_DELAY", 0.01)
    monkeypatch.setattr(fetch, "STALL", 1)
    return Place(tmp_path, capsys)


def test_fetched_once_then_checked_at_every_run(server, place):
    server.answers["/é a.gz"] = Answer(DATA, status=500, times=1)
    place.row(server.url("none.gz"), server.url("é a.gz"), name="é a.gz")
    assert place.fetch() == (0, "é a.gz: fetched, 0.3 MB, sha256 checked\n", "")
    assert place.files() == {"é a.gz": DATA}
    assert place.fetch()[1] == "é a.gz: up to date, sha256 checked\n"
    assert len(server.gets("é a.gz")) == 2, "the first answer was 500"
    (place.folder / "é a.gz").write_bytes(FALSE)
    status, out, _ = place.fetch()
    assert status == 0 and "wrong checksum" in out and "kept aside as é a.gz.bad" in out
    assert place.files() == {"é a.gz": DATA, "é a.gz.bad": FALSE}


def test_checksums_are_those_of_other_programs(tmp_path):
    (tmp_path / "file").write_bytes(DATA)
    for kind, command in (("git-blob", ["git", "hash-object"]), ("sha256", ["sha256sum"]), ("md5", ["md5sum"])):
        printed = subprocess.run([*command, tmp_path / "file"], check=True, capture_output=True, text=True).stdout
        assert fetch.checksum_of(tmp_path / "file", kind) == f"{kind}:{printed.split()[0]}"


@pytest.mark.parametrize(
    ("trouble", "asked"), [({"drop_at": 100_000}, "bytes=100000-"), ({"stall_at": 0}, None)], ids=["drop", "stall"]
)
def test_a_broken_transfer_is_resumed(server, place, trouble, asked):
    server.answers["/a.gz"] = Answer(DATA, times=1, **trouble)
    place.row(server.url("a.gz"))
    assert place.fetch()[0] == 0 and place.files() == {"a.gz": DATA}
    assert server.gets("a.gz") == [None, asked]


def test_the_part_is_resumed_by_the_next_url_and_the_next_run(server, place):
    server.answers["/1.gz"] = Answer(DATA, drop_at=100_000)
    server.answers["/2.gz"] = Answer(DATA, drop_at=200_000)
    place.row(server.url("1.gz"), server.url("2.gz"))
    error = place.fails()
    assert "1.gz: truncated: the connection was closed after 100,000 bytes" in error
    assert "0.2 MB kept, the same command resumes from there" in error
    assert place.files() == {"a.gz.part": DATA[:200_000]}
    server.answers["/1.gz"] = Answer(DATA)
    assert place.fetch()[0] == 0 and place.files() == {"a.gz": DATA}
    assert server.gets("2.gz")[0] == "bytes=100000-" and server.gets("1.gz")[-1] == "bytes=200000-"


@pytest.mark.parametrize("ranges", [True, False], ids=["resumes", "cannot resume"])
@pytest.mark.parametrize("size", [SIZE, "-"], ids=["size", "no size"])
@pytest.mark.parametrize(
    "part", [DATA[:1000], OTHER[:1000], FALSE, DATA + b"more"], ids=["its own", "another's", "whole, false", "longer"]
)
def test_whatever_the_part_was(server, place, part, size, ranges):
    server.answers["/a.gz"] = Answer(DATA, ranges=ranges)
    place.row(server.url("a.gz"), size=size)
    place.begun(part)
    assert place.fetch()[0] == 0 and place.files() == {"a.gz": DATA}


def test_a_whole_part_needs_no_download(server, place):
    place.row(server.url("a.gz"))
    place.begun(DATA)
    assert place.fetch()[0] == 0 and server.requests == []


def test_kill_9_and_again(server, place):
    """A curl that outlives its killed parent keeps others from the file that it writes."""
    server.answers["/a.gz"] = Answer(DATA, stall_at=100_000, times=1)
    place.row(server.url("a.gz"))
    command = [sys.executable, "-m", "fairseq_rskip.tools.prepare.fetch", place.list, place.folder]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT, start_new_session=True)
    part, deadline = place.folder / "a.gz.part", time.monotonic() + 60
    while not (part.exists() and part.stat().st_size > 50_000) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "another run is still downloading into" in place.fails()
    os.killpg(process.pid, signal.SIGKILL)
    while "still downloading" in place.fetch()[2]:
        assert time.monotonic() < deadline
    assert place.files() == {"a.gz": DATA}
    assert server.gets("a.gz")[0] is None and int(server.gets("a.gz")[1][6:-1]) > 50_000


@pytest.fixture
def mirror(tmp_path):
    folder = tmp_path / "mirror ü"
    folder.mkdir()
    (folder / "é a.gz").write_bytes(DATA)
    return folder


@pytest.mark.parametrize("how", ["linked", "copied"])
def test_from_a_folder(place, mirror, monkeypatch, how):
    if how == "copied":
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "another device")))
    monkeypatch.setenv("PATH", "")  # curl is not needed
    place.row("https://example.org/a.gz", name="é a.gz")
    assert place.fetch("--from", mirror)[1] == f"é a.gz: {how} from {mirror}, 0.3 MB, sha256 checked\n"
    assert place.files() == {"é a.gz": DATA}
    (mirror / "é a.gz").unlink()
    assert place.fetch("--from", mirror)[1] == "é a.gz: up to date, sha256 checked\n"


def test_from_a_folder_that_lacks_some_or_holds_others(place, mirror):
    for name in ("é a.gz", "b.gz", "c.gz"):
        place.row("https://example.org/", name=name)
    assert f"--from {mirror} lacks b.gz, c.gz" in place.fails("--from", mirror)
    for name in ("é a.gz", "b.gz", "c.gz"):
        (mirror / name).write_bytes(WEB_PAGE)
    assert f"{mirror / 'é a.gz'}: a web page (HTML) in place" in place.fails("--from", mirror)
    assert (mirror / "é a.gz").read_bytes() == WEB_PAGE and place.files() == {}
    assert "neither a folder nor" in place.fails("--from", mirror / "none")


def test_from_a_url(server, place, mirror):
    server.answers["/sub/é a.gz"] = Answer(DATA)
    place.row("https://example.org/a.gz", name="é a.gz")
    for url in (server.url("sub/"), mirror.as_uri()):
        assert place.fetch("--from", url)[0] == 0 and place.files() == {"é a.gz": DATA}
        shutil.rmtree(place.folder)


def test_the_lists_of_the_project():
    """Well-formed, and a file that two lists share is pinned alike."""
    lists = sorted((ROOT / "data-prep" / "archives").glob("*.tsv"))
    archives = {archive for path in lists for archive in fetch.read_list(path)}
    assert len(lists) >= 5 and all(len(archive.urls) >= 2 for archive in archives)
    assert len(archives) == len({archive.name for archive in archives})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(status=404), ["HTTP 404"]),
        (Answer(status=500), ["HTTP 500"]),
        (Answer(DATA, drop_at=1000), ["truncated: the connection was closed after 1,000 bytes; 1,000 bytes kept"]),
        (Answer(DATA, stall_at=0), ["next to no data for 1 s"]),
        (Answer(DATA[:5000]), [f"truncated: 5,000 bytes, expected {SIZE:,}", "kept aside as a.gz.bad"]),
        (Answer(DATA + b"1"), [f"{SIZE + 1:,} bytes, expected {SIZE:,}"]),
        (Answer(FALSE), ["wrong checksum: expected " + SHA + ", got sha256:", "kept aside as a.gz.bad"]),
        (Answer(WEB_PAGE), ["a web page (HTML) in place of the archive"]),
        (Answer(b"", drop_at=0), ["truncated: 0 bytes, expected"]),
    ],
    ids=["404", "500", "drop", "stall", "short", "long", "checksum", "html", "empty"],
)
def test_what_a_server_did_is_told(server, place, monkeypatch, answer, words):
    monkeypatch.setattr(fetch, "RETRIES", 0)
    server.answers["/a.gz"] = answer
    place.row(server.url("none.gz"), server.url("a.gz"))
    error = place.fails()
    assert f"cannot fetch a.gz: {server.url('none.gz')}: HTTP 404; {server.url('a.gz')}: " in error
    assert all(word in error for word in words), error


def test_connection_refused(place):
    with Loopback() as server:
        url = server.url("a.gz")
    place.row(url, size="-")
    assert "127.0.0.1" in place.fails()


def test_no_space(server, place, monkeypatch):
    """Before a download by what is listed, and during one: a limit on the size of files stands for the disk."""
    server.answers["/a.gz"] = Answer(DATA)
    place.row(server.url("a.gz"))
    command = [sys.executable, "-m", "fairseq_rskip.tools.prepare.fetch", place.list, place.folder]
    done = run_command(["bash", "-c", 'ulimit -f 100; exec "$@"', "-", *command])
    assert done.returncode == 1 and done.stderr.startswith(f"error: cannot write {place.folder}/a.gz.part (disk full?)")
    assert len(done.stderr.splitlines()) == 1
    asked = len(server.requests)
    place.row(server.url("a.gz"), name="b.gz", size=60_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 250_000))
    error = place.fails()
    assert "no space in" in error and "0.3 MB needed, 0.2 MB free" in error and len(server.requests) == asked


def test_no_curl_and_no_folder(server, place, monkeypatch):
    place.row(server.url("a.gz"))
    monkeypatch.setenv("PATH", str(place.root))
    assert "curl is not installed" in place.fails()
    place.folder.rmdir()
    place.folder.write_text("a file")
    assert str(place.folder) in place.fails()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            f"a.gz 10 {SHA} http://x/",
            "line 2: expected, separated by tabs, a name without '/', its size or '-', sha256:",
        ),
        (f"a.gz\tten\t{SHA}\thttp://x/", "line 2: expected"),
        ("a.gz\t1\tsha1:00\thttp://x/", "line 2: expected"),
        ("a.gz\t1\tsha256:00\thttp://x/", "line 2: expected"),
        ("a.gz\t1\t-\thttp://x/", "line 2: expected"),
        (f"../a.gz\t1\t{SHA}\thttp://x/", "line 2: expected"),
        (f".a.gz\t1\t{SHA}\thttp://x/", "line 2: expected"),
        (f"a.gz\t1\t{SHA}\thttp://x/\thtp://x/", "line 2: expected"),
        (f"a.gz\t1\t{SHA}\t-oProxyCommand", "line 2: expected"),
        (f"b.gz\t1\t{SHA}\thttp://x/\nb.gz\t1\t{SHA}\thttp://x/", "line 3: b.gz is listed twice"),
        ("", "lists no archive"),
    ],
    ids="blanks size kind digits no-checksum parent hidden scheme option twice nothing".split(),
)
def test_a_malformed_list(place, row, words):
    assert "list.tsv: No such file" in place.fails()
    place.list.write_text(f"# name\tsize\n{row}\n", encoding="utf-8")
    assert words in place.fails()
