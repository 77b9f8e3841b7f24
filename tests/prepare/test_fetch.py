"""Archives over a loopback server: what common.sh's fetch_all gets, checks and resumes, and unpack."""

import gzip
import hashlib
import random
import shutil
import subprocess

import pytest
from conftest import ROOT, run_command
from corpus_archives import tarball
from loopback import WEB_PAGE, Answer, Loopback

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")

COMMON = ROOT / "data-prep" / "common.sh"
DATA = gzip.compress(random.Random(1).randbytes(300_000), mtime=0)
OTHER = gzip.compress(random.Random(2).randbytes(300_000), mtime=0)
SHA = "sha256:" + hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def server():
    with Loopback() as server:
        yield server


class Place:
    """A list and a folder to fetch into, with a space and letters beyond ASCII in their paths."""

    def __init__(self, root):
        self.out, self.list = root / "dữ liệu é", root / "list é.tsv"
        self.archives = self.out / "archives"
        self.archives.mkdir(parents=True)

    def row(self, *urls, name="a.gz", size="-", checksum=SHA):
        with open(self.list, "a", encoding="utf-8") as file:
            file.write("\t".join([name, str(size), checksum, *urls]) + "\n")

    def script(self, source="", command="fetch_all"):
        variables = f"corpus=c out='{self.out}' part='{self.out}' from='{source}' archives='{self.list}'"
        return f"source '{COMMON}'; STALL=1 RETRY_DELAY=0.01; {variables}; {command}"

    def fetch(self, source="", command="fetch_all"):
        return run_command(["bash", "-c", self.script(source, command)])

    def fails(self, source="", command="fetch_all"):
        """The one line on stderr of a run that must fail."""
        done = self.fetch(source, command)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done
        assert done.stderr.startswith("error: ") and not (self.archives / "a.gz").exists()
        return done.stderr

    def files(self):
        return {path.name: path.read_bytes() for path in self.archives.iterdir()}


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_fetched_once_then_checked_at_every_run(server, place):
    server.answers["/a.gz"] = Answer(DATA, status=500, times=1)
    place.row(server.url("none.gz"), server.url("a.gz"))
    assert place.fetch().stdout == "c: a.gz: fetched, sha256 checked\n"
    assert place.files() == {"a.gz": DATA}
    assert "up to date" in place.fetch().stdout and len(server.gets("a.gz")) == 2
    (place.archives / "a.gz").write_bytes(OTHER)
    assert place.fetch().returncode == 0
    assert place.files() == {"a.gz": DATA, "a.gz.bad": OTHER}


@pytest.mark.parametrize(
    ("kind", "command"), [("git-blob", "git hash-object"), ("sha256", "sha256sum"), ("md5", "md5sum")]
)
def test_checksums_are_those_of_other_programs(place, kind, command):
    path = place.out / "file"
    path.write_bytes(DATA)
    expected = subprocess.run([*command.split(), path], check=True, capture_output=True, text=True).stdout.split()[0]
    assert place.fetch(command=f"checksum {kind} '{path}'").stdout.split() == [expected]


@pytest.mark.parametrize(
    ("trouble", "asked"), [({"drop_at": 100_000}, "bytes=100000-"), ({"stall_at": 0}, None)], ids=["drop", "stall"]
)
def test_a_broken_transfer_is_resumed(server, place, trouble, asked):
    server.answers["/a.gz"] = Answer(DATA, times=1, **trouble)
    place.row(server.url("a.gz"))
    assert place.fetch().returncode == 0 and place.files() == {"a.gz": DATA}
    assert server.gets("a.gz") == [None, asked]


def test_the_part_is_resumed_by_the_next_url_and_the_next_run(server, place):
    server.answers["/1.gz"] = Answer(DATA, drop_at=100_000)
    server.answers["/2.gz"] = Answer(DATA, drop_at=200_000)
    place.row(server.url("1.gz"), server.url("2.gz"))
    assert "the same command resumes" in place.fails()
    assert place.files() == {"a.gz.part": DATA[:200_000]}
    server.answers["/1.gz"] = Answer(DATA)
    assert place.fetch().returncode == 0 and place.files() == {"a.gz": DATA}
    assert server.gets("2.gz")[0] == "bytes=100000-" and server.gets("1.gz")[-1] == "bytes=200000-"


@pytest.mark.parametrize("ranges", [True, False], ids=["resumes", "cannot resume"])
@pytest.mark.parametrize(
    "part", [DATA, DATA[:1000], OTHER[:1000], OTHER, DATA + b"more"], ids="whole own another false longer".split()
)
def test_whatever_the_part_was(server, place, part, ranges):
    server.answers["/a.gz"] = Answer(DATA, ranges=ranges)
    place.row(server.url("a.gz"))
    (place.archives / "a.gz.part").write_bytes(part)
    assert place.fetch().returncode == 0 and place.files()["a.gz"] == DATA
    assert (server.requests == []) == (part == DATA)


def test_from_a_folder_or_a_url(server, place, tmp_path):
    mirror = tmp_path / "mirror ü"
    mirror.mkdir()
    (mirror / "a.gz").write_bytes(DATA)
    server.answers["/sub/a.gz"] = Answer(DATA)
    place.row("https://example.org/a.gz")
    for source in (mirror, server.url("sub/"), mirror.as_uri()):
        assert place.fetch(source).returncode == 0 and place.files() == {"a.gz": DATA}
        (place.archives / "a.gz").unlink()
    (mirror / "a.gz").write_bytes(WEB_PAGE)
    assert "a.gz: wrong checksum (a web page)" in place.fails(mirror)
    assert (mirror / "a.gz").read_bytes() == WEB_PAGE
    assert "/none: expected a folder or a URL" in place.fails(mirror / "none")


def test_the_lists_of_the_project():
    """Well-formed, and a file that two lists share is pinned alike."""
    lists = sorted((ROOT / "data-prep" / "archives").glob("*.tsv"))
    rows = [line.split("\t") for path in lists for line in path.read_text().splitlines() if not line.startswith("#")]
    assert len(lists) >= 5 and all(len(row) >= 5 for row in rows)
    assert len({tuple(row[:3]) for row in rows}) == len({row[0] for row in rows})


def test_no_connection(place):
    with Loopback() as server:
        url = server.url("a.gz")
    place.row(url)
    assert "127.0.0.1" in place.fails()


def test_a_damaged_archive_or_a_missing_member_is_one_line(place):
    path = place.archives / "x.tgz"
    tarball(path, {"a": random.Random(1).randbytes(50_000)})
    assert "cannot unpack x.tgz" in place.fails(command="unpack=(x.tgz 'b*'); unpacked")
    path.write_bytes(path.read_bytes()[:-5000])
    assert "cannot unpack x.tgz" in place.fails(command="unpack=(x.tgz '*'); unpacked")
