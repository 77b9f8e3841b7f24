"""data-prep/fetch.py over a loopback server: what is fetched, checked, resumed and remembered."""

# ruff: noqa: F811  (fixtures are imported by name)

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from fetch_helpers import DATA, FALSE, OTHER, SCRIPT, SHA, SIZE, checksums, fetch, place, server  # noqa: F401
from loopback import WEB_PAGE, Answer

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def test_fetched_once_then_up_to_date(server, place, monkeypatch):
    server.answers["/é a.gz"] = Answer(DATA)
    place.row(server.url("é a.gz"), name="é a.gz")
    assert place.fetch() == (0, "é a.gz: fetched, 0.3 MB, sha256 checked\n", "")
    assert place.files() == {"é a.gz": DATA}
    monkeypatch.setattr(fetch, "checksum_of", lambda *_: pytest.fail("an unchanged file was read again"))
    assert place.fetch()[1] == "é a.gz: up to date\n"
    assert len(server.requests) == 1


def test_git_blob_is_what_git_computes(tmp_path):
    (tmp_path / "file").write_bytes(DATA)
    for kind, command in (("git-blob", ["git", "hash-object"]), ("sha256", ["sha256sum"]), ("md5", ["md5sum"])):
        if shutil.which(command[0]):
            printed = subprocess.run([*command, tmp_path / "file"], check=True, capture_output=True, text=True).stdout
            assert checksums.checksum_of(tmp_path / "file", kind) == f"{kind}:{printed.split()[0]}"


def test_a_file_that_changed_on_disk_is_checked_again(server, place):
    server.answers["/a.gz"] = Answer(DATA)
    place.row(server.url("a.gz"))
    place.fetch()
    os.utime(place.folder / "a.gz", (1, 1))
    assert place.fetch()[1] == "a.gz: up to date, sha256 checked\n"
    (place.folder / "a.gz").write_bytes(FALSE)
    status, out, _ = place.fetch()
    assert status == 0 and "wrong checksum" in out and "kept aside as a.gz.bad" in out
    assert place.files() == {"a.gz": DATA, "a.gz.bad": FALSE}


def test_second_url_when_the_first_fails(server, place):
    server.answers["/good.gz"] = Answer(DATA)
    place.row(server.url("none.gz"), server.url("good.gz"))
    assert place.fetch()[0] == 0 and place.files() == {"a.gz": DATA}


def test_500_once_is_tried_again(server, place):
    server.answers["/a.gz"] = Answer(DATA, status=500, times=1)
    place.row(server.url("a.gz"))
    assert place.fetch()[0] == 0 and len(server.gets("a.gz")) == 2


@pytest.mark.parametrize("trouble", [{"drop_at": 100_000}, pytest.param({"stall_at": 100_000}, marks=pytest.mark.slow)])
def test_a_broken_transfer_goes_on_where_it_stopped(server, place, trouble):
    server.answers["/a.gz"] = Answer(DATA, times=1, **trouble)
    place.row(server.url("a.gz"))
    assert place.fetch("--stall", 1)[0] == 0 and place.files() == {"a.gz": DATA}
    assert server.gets("a.gz") == [None, "bytes=100000-"]


def test_the_part_is_resumed_by_the_next_url_and_the_next_run(server, place):
    server.answers["/1.gz"] = Answer(DATA, drop_at=100_000)
    server.answers["/2.gz"] = Answer(DATA, drop_at=200_000)
    place.row(server.url("1.gz"), server.url("2.gz"))
    error = place.fails()
    assert "1.gz: truncated: the connection was closed after 100,000 of 300," in error
    assert "0.2 MB kept, the same command goes on from there" in error
    assert place.files() == {"a.gz.part": DATA[:200_000]}
    server.answers["/1.gz"] = Answer(DATA)
    assert place.fetch()[0] == 0 and place.files() == {"a.gz": DATA}
    assert server.gets("2.gz")[0] == "bytes=100000-" and server.gets("1.gz")[-1] == "bytes=200000-"


def test_a_server_that_cannot_resume_starts_anew(server, place):
    server.answers["/a.gz"] = Answer(DATA, ranges=False)
    place.row(server.url("a.gz"))
    place.folder.mkdir()
    (place.folder / "a.gz.part").write_bytes(DATA[:1000])
    assert place.fetch()[0] == 0 and place.files() == {"a.gz": DATA}


@pytest.mark.parametrize("part", [OTHER[:1000], FALSE, DATA + b"more"], ids=["short", "whole", "long"])
@pytest.mark.parametrize("size", [SIZE, "-"])
def test_a_part_of_another_file_does_no_harm(server, place, part, size):
    server.answers["/a.gz"] = Answer(DATA)
    place.row(server.url("a.gz"), size=size)
    place.folder.mkdir()
    (place.folder / "a.gz.part").write_bytes(part)
    assert place.fetch()[0] == 0 and place.files() == {"a.gz": DATA}


def test_a_whole_part_needs_no_download(server, place):
    place.row(server.url("a.gz"))
    place.folder.mkdir()
    (place.folder / "a.gz.part").write_bytes(DATA)
    assert place.fetch()[0] == 0 and server.requests == []


def test_kill_9_and_again(server, place):
    server.answers["/a.gz"] = Answer(DATA, pause=0.2, piece=20_000)
    place.row(server.url("a.gz"))
    process = subprocess.Popen([sys.executable, SCRIPT, place.list, place.folder], stderr=subprocess.DEVNULL)
    part = place.folder / "a.gz.part"
    deadline = time.monotonic() + 20
    while not (part.exists() and part.stat().st_size > 20_000) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "another run is fetching into" in place.fails()
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = part.read_bytes()
    assert 20_000 < len(kept) < SIZE and DATA.startswith(kept)
    server.answers["/a.gz"].pause = 0
    assert place.fetch()[0] == 0 and place.files() == {"a.gz": DATA}
    assert server.gets("a.gz") == [None, f"bytes={len(kept)}-"]


def test_no_checksum_pinned_the_first_one_counts(server, place):
    server.answers["/a.gz"] = Answer(DATA)
    place.row(server.url("a.gz"), size="-", checksum="-")
    assert place.fetch()[1] == f"a.gz: fetched, 0.3 MB, sha256 recorded in {place.lock}\n"
    assert f"a.gz\t{SIZE}\t{SHA}\n" in place.lock.read_text(encoding="utf-8")
    assert place.fetch()[1] == "a.gz: up to date\n"
    shutil.rmtree(place.folder)
    assert place.fetch()[1] == f"a.gz: fetched, 0.3 MB, sha256 checked against the lock {place.lock}\n"
    shutil.rmtree(place.folder)
    server.answers["/a.gz"] = Answer(FALSE)
    error = place.fails()
    assert SHA in error and f"by {place.lock}" in error and "kept aside as a.gz.bad" in error
    assert place.fetch("--lock", place.root / "another.lock")[0] == 0


@pytest.mark.parametrize(("etag", "mixed"), [('"1"', False), ('"2"', True), (None, True)])
def test_an_unpinned_part_goes_on_only_with_the_same_version(server, place, etag, mixed):
    """No checksum could tell a mixture of two versions later."""
    server.answers["/a.gz"] = Answer(OTHER, drop_at=1000, etag='"1"')
    place.row(server.url("a.gz"), size="-", checksum="-")
    place.fails()
    server.answers["/a.gz"] = Answer(DATA if mixed else OTHER, etag=etag)
    assert place.fetch()[0] == 0 and place.files() == {"a.gz": DATA if mixed else OTHER}
    assert server.gets("a.gz")[-1] == (None if mixed else "bytes=1000-")


@pytest.fixture
def mirror(tmp_path):
    folder = tmp_path / "mirror ü"
    folder.mkdir()
    (folder / "a.gz").write_bytes(DATA)
    return folder


@pytest.mark.parametrize("links", [True, False])
def test_from_a_folder(place, mirror, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "another device")))
    monkeypatch.setenv("PATH", "")
    place.row("https://example.org/a.gz")
    how = "linked" if links else "copied"
    assert place.fetch("--from", mirror)[1] == f"a.gz: {how} from {mirror}, 0.3 MB, sha256 checked\n"
    assert place.files() == {"a.gz": DATA}
    (mirror / "a.gz").unlink()
    assert place.fetch("--from", mirror)[1] == "a.gz: up to date\n"


def test_from_a_folder_that_lacks_some_or_holds_others(place, mirror):
    for name in ("a.gz", "b.gz", "c.gz"):
        place.row("https://example.org/", name=name)
    assert f"--from {mirror} lacks b.gz, c.gz" in place.fails("--from", mirror)
    (mirror / "a.gz").write_bytes(WEB_PAGE)
    shutil.copy(mirror / "a.gz", mirror / "b.gz")
    shutil.copy(mirror / "a.gz", mirror / "c.gz")
    assert f"{mirror / 'a.gz'}: a web page (HTML) in place" in place.fails("--from", mirror)
    assert (mirror / "a.gz").read_bytes() == WEB_PAGE and place.files() == {}
    assert "neither a folder nor" in place.fails("--from", mirror / "none")


def test_from_a_url(server, place, mirror):
    server.answers["/sub/é a.gz"] = Answer(DATA)
    place.row("https://example.org/a.gz", name="é a.gz")
    assert place.fetch("--from", server.url("sub/"))[0] == 0 and place.files() == {"é a.gz": DATA}
    shutil.rmtree(place.folder)
    (mirror / "é a.gz").write_bytes(DATA)
    assert place.fetch("--from", mirror.as_uri())[0] == 0 and place.files() == {"é a.gz": DATA}


def test_the_lists_of_the_project():
    """Well-formed, and a file that two lists share is pinned alike."""
    lists = sorted((SCRIPT.parent / "archives").glob("*.tsv"))
    assert len(lists) >= 5
    archives = [archive for path in lists for archive in checksums.read_list(path)]
    assert all(archive.checksum and len(archive.urls) >= 2 for archive in archives)
    assert len({(a.name, a.size, a.checksum, a.urls) for a in archives}) == len({a.name for a in archives})
