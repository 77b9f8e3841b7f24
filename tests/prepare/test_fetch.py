"""Archives over a loopback server: what is fetched, checked, resumed and unpacked."""

import errno
import gzip
import hashlib
import random
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from corpus_archives import tarball
from loopback import WEB_PAGE, Answer, Loopback

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.prepare import archives

DATA = gzip.compress(random.Random(1).randbytes(300_000), mtime=0)
OTHER = gzip.compress(random.Random(2).randbytes(300_000), mtime=0)
SHA = "sha256:" + hashlib.sha256(DATA).hexdigest()

pytestmark = pytest.mark.timeout(300)  # a download that never gives up must not stop the suite


@pytest.fixture
def server():
    with Loopback() as server:
        yield server


class Place:
    """A list and a folder to fetch into, with a space and letters beyond ASCII in their paths."""

    def __init__(self, root, capsys):
        self.list, self.capsys = root / "list é.tsv", capsys
        self.archives = root / "dữ liệu é" / "archives"
        self.archives.mkdir(parents=True)

    def row(self, *urls, name="a.gz", size="-", checksum=SHA):
        with open(self.list, "a", encoding="utf-8") as file:
            file.write("\t".join([name, str(size), checksum, *map(str, urls)]) + "\n")

    def fetch(self, source=""):
        """What is printed."""
        archives.fetch_all(archives.read_list(self.list, str(source)), self.archives, "c")
        return self.capsys.readouterr().out

    def fails(self, source=""):
        """The message of a run that must fail."""
        with pytest.raises(UserError) as failed:
            self.fetch(source)
        assert not (self.archives / "a.gz").exists()
        return str(failed.value)

    def files(self):
        return {path.name: path.read_bytes() for path in self.archives.iterdir()}


@pytest.fixture
def place(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(archives, "STALL", 1.0)
    monkeypatch.setattr(archives, "DELAY", 0.01)
    return Place(tmp_path, capsys)


def test_fetched_once_then_checked_at_every_run(server, place):
    server.answers["/a.gz"] = Answer(DATA, status=500, times=1)
    place.row(server.url("none.gz"), server.url("a.gz"))
    assert place.fetch() == "c: a.gz: fetched, sha256 checked\n"
    assert place.files() == {"a.gz": DATA}
    assert len(server.gets("none.gz")) == 1  # a file that is not there is not asked for again
    assert "up to date" in place.fetch() and len(server.gets("a.gz")) == 2
    (place.archives / "a.gz").write_bytes(OTHER)
    assert "fetched" in place.fetch()
    assert place.files() == {"a.gz": DATA, "a.gz.bad": OTHER}


def test_nothing_is_fetched_that_the_disk_has_no_room_for(server, place):
    server.answers["/a.gz"] = Answer(DATA)
    place.row(server.url("a.gz"), size=len(DATA))
    place.row(server.url("b.gz"), name="b.gz", size=10**18)
    assert "the archives need another 1000000000.0 GB" in place.fails()
    assert not server.gets("a.gz")


def test_only_what_is_missing_needs_room(server, place, monkeypatch):
    """An archive that is there needs none, and one that was begun needs room for the rest."""
    server.answers["/a.gz"] = Answer(DATA)
    place.row(server.url("a.gz"), size=len(DATA))
    (place.archives / "a.gz.part").write_bytes(DATA[:-1000])
    for free in (1000, 0):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, usage=usage: usage)
        assert "sha256 checked" in place.fetch()


def test_a_copy_of_your_own_needs_no_room_for_a_download(place, tmp_path):
    (tmp_path / "a.gz").write_bytes(DATA)
    place.row("http://unused.invalid/a.gz", size=10**18)
    assert "fetched" in place.fetch(tmp_path)


@pytest.mark.parametrize(
    ("kind", "command"),
    [("git-blob", "git hash-object"), ("sha256", "sha256sum"), ("md5", "md5sum")],
)
def test_archives_have_the_checksums_of_other_programs(place, tmp_path, kind, command):
    path = tmp_path / "a.gz"
    path.write_bytes(DATA)
    expected = subprocess.run(
        [*command.split(), path], check=True, capture_output=True, text=True
    ).stdout.split()[0]
    place.row("http://unused.invalid/a.gz", checksum=f"{kind}:{expected}")
    assert place.fetch(tmp_path) == f"c: a.gz: fetched, {kind} checked\n"


@pytest.mark.parametrize(
    ("trouble", "asked"),
    [
        ({"drop_at": 100_000}, "bytes=100000-"),
        ({"drop_at": len(DATA) - 1}, f"bytes={len(DATA) - 1}-"),
        ({"stall_at": 0}, None),
        ({"not_http": b"no HTTP\r\n"}, None),
    ],
    ids=["drop", "drop of the last byte", "stall", "no HTTP"],
)
def test_a_broken_transfer_is_resumed(server, place, trouble, asked):
    server.answers["/a.gz"] = Answer(DATA, times=1, **trouble)
    place.row(server.url("a.gz"))
    assert "fetched" in place.fetch() and place.files() == {"a.gz": DATA}
    assert server.gets("a.gz") == [None, asked]


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_a_final_refusal_is_not_asked_again(server, place, status):
    server.answers["/a.gz"] = Answer(status=status)
    place.row(server.url("a.gz"))
    assert f"HTTP Error {status}" in place.fails()
    assert len(server.gets("a.gz")) == 1


def test_tries_are_counted_again_after_one_that_brought_bytes(server, place):
    """Of every four tries the first brings bytes and three bring none."""
    stops = [100_000] * 4 + [200_000] * 4
    server.answers["/a.gz"] = Answer(DATA, drop_at=(len(DATA), *stops))
    place.row(server.url("a.gz"))
    assert "fetched" in place.fetch() and place.files() == {"a.gz": DATA}
    assert len(server.gets("a.gz")) == len(stops) + 1


def test_a_server_that_begins_again_each_time_is_given_up(server, place):
    """The part is shorter and longer in turn, and never longer than it has been."""
    server.answers["/a.gz"] = Answer(DATA, ranges=False, drop_at=(100_000, 50_000))
    place.row(server.url("a.gz"))
    assert "the transfer ended after" in place.fails()
    assert len(server.gets("a.gz")) <= 2 + archives.TRIES


def test_the_part_is_resumed_by_the_next_url_and_the_next_run(server, place):
    server.answers["/1.gz"] = Answer(DATA, drop_at=100_000)
    server.answers["/2.gz"] = Answer(DATA, drop_at=200_000)
    place.row(server.url("1.gz"), server.url("2.gz"))
    message = place.fails()
    assert "the same command resumes" in message and "--from FOLDER" in message
    assert place.files() == {"a.gz.part": DATA[:200_000]}
    server.answers["/1.gz"] = Answer(DATA)
    assert "fetched" in place.fetch() and place.files() == {"a.gz": DATA}
    assert server.gets("2.gz")[0] == "bytes=100000-" and server.gets("1.gz")[-1] == "bytes=200000-"


def test_a_wrong_file_is_kept_as_bad_and_the_next_url_starts_from_nothing(server, place):
    server.answers["/1.gz"] = Answer(WEB_PAGE)
    server.answers["/2.gz"] = Answer(DATA)
    place.row(server.url("1.gz"), server.url("2.gz"))
    assert "fetched" in place.fetch()
    assert place.files() == {"a.gz": DATA, "a.gz.bad": WEB_PAGE}


def test_a_part_of_another_file_does_not_count_as_progress(server, place):
    """The server refuses its range; then the tries bring less, one after the other, than it had."""
    part = place.archives / "a.gz.part"
    part.write_bytes(DATA + b"more")
    steps = range(50_000, len(DATA), 50_000)
    server.answers["/a.gz"] = Answer(DATA, drop_at=(50_000, *steps, len(DATA)))
    archives.download(server.url("a.gz"), part)
    assert part.read_bytes() == DATA and len(steps) > archives.TRIES


@pytest.mark.parametrize("ranges", [True, False], ids=["resumes", "cannot resume"])
@pytest.mark.parametrize(
    "part",
    [DATA, DATA[:1000], OTHER[:1000], OTHER, DATA + b"more"],
    ids="whole own another false longer".split(),
)
def test_whatever_the_part_was(server, place, part, ranges):
    server.answers["/a.gz"] = Answer(DATA, ranges=ranges)
    place.row(server.url("a.gz"))
    (place.archives / "a.gz.part").write_bytes(part)
    assert "fetched" in place.fetch() and place.files()["a.gz"] == DATA
    assert (server.requests == []) == (part == DATA)


def test_from_a_folder_or_a_url(server, place, tmp_path):
    mirror = tmp_path / "mirror ü"
    mirror.mkdir()
    (mirror / "a.gz").write_bytes(DATA)
    server.answers["/sub/a.gz"] = Answer(DATA)
    place.row("https://example.org/a.gz")
    for source in (mirror, server.url("sub/"), mirror.as_uri()):
        assert "fetched" in place.fetch(source) and place.files() == {"a.gz": DATA}
        (place.archives / "a.gz").unlink()
    (mirror / "a.gz").write_bytes(WEB_PAGE)
    assert "a.gz: wrong checksum (a web page)" in place.fails(mirror)
    assert (mirror / "a.gz").read_bytes() == WEB_PAGE
    place.list.unlink()
    place.row("https://example.org/a.gz", size=len(DATA))
    (mirror / "a.gz").write_bytes(DATA[:1000])
    failure = place.fails(mirror)
    assert f"wrong checksum (1,000 of {len(DATA):,} bytes); expected the whole a.gz" in failure
    assert "/none: expected a folder or a URL" in place.fails(mirror / "none")


def test_a_file_in_the_place_of_a_folder_of_archives_is_refused(place, tmp_path):
    (tmp_path / "a.gz").write_bytes(DATA)
    place.row("https://example.org/a.gz")
    assert "/a.gz: expected a folder or a URL" in place.fails(tmp_path / "a.gz")


@pytest.mark.parametrize(
    "page",
    [b"<!DOCTYPE html>\n<title>Sign in</title>", b"<HTML><title>Sign in</title></HTML>"],
    ids=["doctype", "html"],
)
def test_a_web_page_in_the_place_of_an_archive_is_called_one(place, tmp_path, page):
    (tmp_path / "a.gz").write_bytes(page)
    place.row("https://example.org/a.gz")
    assert "a.gz: wrong checksum (a web page)" in place.fails(tmp_path)


def test_the_url_beside_a_path_is_taken_where_the_path_is_missing(server, place, tmp_path):
    place.row(tmp_path / "none.gz", server.url("a.gz"))
    assert "the same command resumes" in place.fails()
    server.answers["/a.gz"] = Answer(DATA)
    assert "fetched" in place.fetch()


def test_an_archive_that_is_fetched_is_no_longer_needed_in_the_folder(place, tmp_path):
    (tmp_path / "a.gz").write_bytes(DATA)
    place.row("https://example.org/a.gz")
    place.fetch(tmp_path)
    (tmp_path / "a.gz").unlink()
    assert "up to date" in place.fetch(tmp_path)


def test_an_archive_in_a_folder_is_linked_even_through_a_symbolic_link(place, tmp_path):
    (tmp_path / "mirror").mkdir()
    (tmp_path / "published.gz").write_bytes(DATA)
    (tmp_path / "mirror" / "a.gz").symlink_to("../published.gz")
    place.row("https://example.org/a.gz")
    assert "fetched" in place.fetch(tmp_path / "mirror")
    file = place.archives / "a.gz"
    assert file.samefile(tmp_path / "published.gz") and not file.is_symlink()


def test_an_archive_is_copied_where_it_cannot_be_linked(place, tmp_path, monkeypatch):
    def link(source, target):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(archives.os, "link", link)
    (tmp_path / "a.gz").write_bytes(DATA)
    place.row("https://example.org/a.gz")
    assert "fetched" in place.fetch(tmp_path) and place.files() == {"a.gz": DATA}


def test_a_folder_that_lacks_archives_is_told_which(place, tmp_path):
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / "b.gz").write_bytes(DATA)
    for name in ("a.gz", "b.gz", "c.gz"):
        place.row("https://example.org/" + name, name=name)
    failure = place.fails(mirror)
    assert f"{mirror} lacks a.gz, c.gz; expected the archives of c" in failure
    assert failure.endswith("a.gz, b.gz, c.gz") and "\n" not in failure
    assert not place.files()


def test_a_download_never_writes_into_an_archive_of_yours(server, place, tmp_path):
    """A run with --from that was killed leaves a link to the archive as its part."""
    mine = tmp_path / "a.gz"
    mine.write_bytes(DATA[:1000])
    (place.archives / "a.gz.part").hardlink_to(mine)
    server.answers["/a.gz"] = Answer(DATA)
    place.row(server.url("a.gz"))
    assert "fetched" in place.fetch() and place.files()["a.gz"] == DATA
    assert mine.read_bytes() == DATA[:1000]


def test_the_lists_of_the_project():
    """Well-formed, and a file that two lists share is pinned alike.

    Each has two addresses, but for files of PyPI, which has mirrors of its own.
    """
    lists = sorted((ROOT / "data-prep" / "archives").glob("*.tsv"))
    rows = [
        line.split("\t")
        for path in lists
        for line in path.read_text().splitlines()
        if not line.startswith("#")
    ]
    assert len(lists) >= 5
    for row in rows:
        assert len(row) >= 5 or row[3].startswith("https://files.pythonhosted.org/")
    assert len({tuple(row[:3]) for row in rows}) == len({row[0] for row in rows})


def test_a_server_that_does_not_answer_is_tried_again_after_pauses(place, monkeypatch):
    pauses = []
    monkeypatch.setattr(archives.time, "sleep", pauses.append)
    with Loopback() as server:
        url = server.url("a.gz")
    place.row(url)
    assert "127.0.0.1" in place.fails()
    assert pauses == [archives.DELAY] * (archives.TRIES - 1)


def test_a_list_may_have_comments_and_empty_lines(place, tmp_path):
    (tmp_path / "a.gz").write_bytes(DATA)
    place.list.write_text("# a comment\n\n")
    place.row("https://example.org/a.gz")
    assert "fetched" in place.fetch(tmp_path)


@pytest.mark.parametrize("row", ["a.gz\t-\tsha256:12\thttp://x", "a.gz - sha256", "../a\t-\tx\ty"])
def test_a_malformed_list_is_one_line(place, row):
    place.list.write_text(row + "\n")
    assert "expected a name, a size or -" in place.fails()


@pytest.mark.parametrize("mode", ["w:gz", "w"], ids=["gzip", "plain"])
def test_only_the_members_that_are_needed_are_unpacked(tmp_path, mode):
    path = tmp_path / "x.tar"
    tarball(path, {"dev/a.en": b"one", "dev/a.de": b"eins", "dev/b.en": b"no"}, mode)
    archives.unpack(path, "dev/a.??", tmp_path / "out")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out" / "dev").iterdir()} == {
        "a.en": b"one",
        "a.de": b"eins",
    }


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_folders_and_links_in_an_archive_are_left_out(tmp_path, kind):
    folder = tmp_path / "published" / "dev"
    folder.mkdir(parents=True)
    (folder / "a.en").write_bytes(b"one")
    (folder / "link").symlink_to(".", target_is_directory=True)
    path = shutil.make_archive(tmp_path / "x", kind, folder.parent)
    archives.unpack(Path(path), "*", tmp_path / "out")
    dev = tmp_path / "out" / "dev"
    assert sorted((tmp_path / "out").rglob("*")) == [dev, dev / "a.en"]


def test_a_member_outside_of_the_folder_is_refused(tmp_path):
    tarball(tmp_path / "x.tgz", {"../evil": b"x"})
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a/../../evil", "x")
    tarball(tmp_path / "absolute.tgz", {f"{tmp_path}/evil": b"x"})
    (tmp_path / "out").mkdir()
    for name in ("x.tgz", "x.zip", "absolute.tgz"):
        with pytest.raises(UserError, match=f"cannot unpack {name}: .*evil leads out"):
            archives.unpack(tmp_path / name, "*", tmp_path / "out")
    assert not (tmp_path / "evil").exists()


def test_a_damaged_archive_or_a_missing_member_is_one_line(tmp_path):
    path = tmp_path / "x.tgz"
    tarball(path, {"a": random.Random(1).randbytes(50_000)})
    with pytest.raises(UserError, match="cannot unpack x.tgz: it has no member b"):
        archives.unpack(path, "b*", tmp_path)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(UserError, match="cannot unpack x.tgz"):
        archives.unpack(path, "*", tmp_path)


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_damaged_zip_file_is_one_line(tmp_path, compression):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("a", "text " * 1000)
    whole = path.read_bytes()
    start = 30 + len("a")  # of the compressed bytes, behind the header and the name
    for damaged in (whole[:-10], whole[:start] + b"\xff" * 20 + whole[start + 20 :]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"^cannot unpack x\.zip: [^\n]+$"):
            archives.unpack(path, "*", tmp_path / "out")


def test_an_encrypted_member_is_one_line(tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "text")
    content = bytearray(path.read_bytes())
    content[6] |= 1  # the flags of the member, and those in the list at the end
    content[content.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"^cannot unpack x\.zip: .*encrypted"):
        archives.unpack(path, "*", tmp_path / "out")
