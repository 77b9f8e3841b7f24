"""data-prep/unpack.py: what it unpacks, and that no archive writes outside the folder."""

import gzip
import io
import os
import random
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from conftest import ROOT, run_command
from loopback import WEB_PAGE

SCRIPT = ROOT / "data-prep" / "unpack.py"
sys.path.insert(0, str(SCRIPT.parent))
import unpack  # noqa: E402

FILES = {"training/é a.en": b"one\n" * 1000, "training/a.de": b"eins\n" * 1000, "./b.de-en.en": b"", "c d/e.txt": b"x"}
NOISE = random.Random(1).randbytes(100_000)


def tar_of(path, *members, mode="w:gz"):
    """A tar of (name, content) or (name, type, link name)."""
    with tarfile.open(path, mode) as tar:
        for name, content, *link in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes) and not link:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                info.type, info.linkname = content, link[0]
                tar.addfile(info)
    return path


def zip_of(path, *members, mode=0o644):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, content)
    return path


@pytest.fixture
def place(tmp_path):
    """A folder whose neighbours show what was written where."""
    (tmp_path / "neighbour").mkdir()
    (tmp_path / "neighbour" / "secret").write_bytes(b"as it was")
    return tmp_path / "út put"


def run(capsys, archive, folder, *only):
    capsys.readouterr()
    options = ["--only", *only] if only else []
    status = unpack.main([str(archive), str(folder), *options])
    return (status, *capsys.readouterr())


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(capsys, archive, folder, *only):
    """The one line of a run that must fail and leave everything as it was."""
    before = tree(archive.parent)
    status, out, error = run(capsys, archive, folder, *only)
    assert status == 1 and out == "" and error.startswith(f"error: {archive}: ") and len(error.splitlines()) == 1, error
    assert tree(archive.parent) == before and not list(folder.rglob(".unpacking*"))
    return error


@pytest.mark.parametrize("name", ["a.tgz", "a b.tar.gz", "ü.tar", "A.ZIP"])
def test_everything_is_unpacked(capsys, tmp_path, place, name):
    mode = "w" if name.endswith(".tar") else "w:gz"
    make = zip_of if name == "A.ZIP" else lambda path, *members: tar_of(path, *members, mode=mode)
    status, out, _ = run(capsys, make(tmp_path / name, *FILES.items()), place)
    assert status == 0 and "unpacked training/é a.en, 4,000 bytes\n" in out
    assert tree(place) == {name.replace("./", ""): content for name, content in FILES.items()}
    assert not [path for path in place.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["training/a.de"], ["training/a.de"]),
        (["*.en"], ["b.de-en.en", "training/é a.en"]),
        (["c*", "training/a.de"], ["c d/e.txt", "training/a.de"]),
    ],
)
def test_only(capsys, tmp_path, place, only, names):
    assert run(capsys, tar_of(tmp_path / "a.tgz", *FILES.items()), place, *only)[0] == 0
    assert sorted(tree(place)) == names


def test_system_tar_and_gzip_made_it(capsys, tmp_path, place):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.en").write_bytes(NOISE)
    subprocess.run(["tar", "-C", tmp_path, "-czf", tmp_path / "t.tgz", "in"], check=True)
    subprocess.run(["gzip", "-k", tmp_path / "in" / "x.en"], check=True)
    assert run(capsys, tmp_path / "t.tgz", place)[0] == 0
    assert run(capsys, tmp_path / "in" / "x.en.gz", place)[0] == 0
    assert tree(place) == {"in/x.en": NOISE, "x.en": NOISE}


def test_gzip_inside_a_tar(capsys, tmp_path, place):
    """As in training-giga-fren.tar."""
    tar = tar_of(tmp_path / "g.tar", ("giga.en.gz", gzip.compress(NOISE)), mode="w")
    assert run(capsys, tar, place)[0] == 0
    assert run(capsys, place / "giga.en.gz", place)[0] == 0
    assert (place / "giga.en").read_bytes() == NOISE


OUT = [("../neighbour/secret", b"evil"), ("a/../../neighbour/new", b"evil"), ("/ABSOLUTE", b"evil"), ("..", b"evil")]


@pytest.mark.parametrize("make", [tar_of, zip_of])
@pytest.mark.parametrize(("name", "content"), OUT)
def test_names_that_lead_out(capsys, tmp_path, place, make, name, content):
    name = name.replace("/ABSOLUTE", str(tmp_path / "neighbour" / "new"))
    archive = make(tmp_path / ("a.zip" if make is zip_of else "a.tgz"), ("good.en", b"x"), (name, content))
    for only in ([], ["good.en"]):
        assert f"refused: member {name!r} leads out of the folder" in refused(capsys, archive, place, *only)


@pytest.mark.parametrize(
    ("kind", "link", "what"),
    [
        (tarfile.SYMTYPE, "../neighbour/secret", "a symbolic link"),
        (tarfile.LNKTYPE, "../neighbour/secret", "a hard link"),
        (tarfile.CHRTYPE, "", "a device"),
        (tarfile.BLKTYPE, "", "a device"),
        (tarfile.FIFOTYPE, "", "a fifo"),
    ],
)
def test_links_and_devices(capsys, tmp_path, place, kind, link, what):
    archive = tar_of(tmp_path / "a.tgz", ("x.en", b"x"), ("bad\nname", kind, link))
    assert f"refused: member 'bad\\nname' is {what}\n" in refused(capsys, archive, place)
    assert run(capsys, archive, place, "*.en")[0] == 0 and tree(place) == {"x.en": b"x"}


def test_a_file_through_a_symbolic_link(capsys, tmp_path, place):
    archive = tar_of(tmp_path / "a.tgz", ("d", tarfile.SYMTYPE, "../neighbour"), ("d/secret", b"evil"))
    assert "member 'd' is a symbolic link" in refused(capsys, archive, place)
    assert "member 'd/secret' goes through a symbolic link" in refused(capsys, archive, place, "d/*")
    subprocess.run(["tar", "-C", tmp_path / "neighbour", "-xf", archive], check=False, capture_output=True)
    archive = zip_of(tmp_path / "a.zip", ("d", b"../neighbour"), mode=0o120777)
    assert "member 'd' is a symbolic link" in refused(capsys, archive, place)


def test_a_link_that_was_there_is_not_followed_out(capsys, tmp_path, place):
    place.mkdir()
    (place / "d").symlink_to(tmp_path / "neighbour")
    (place / "secret").symlink_to(tmp_path / "neighbour" / "secret")
    archive = tar_of(tmp_path / "a.tgz", ("d/secret", b"evil"))
    assert "leads member 'd/secret' out of it" in refused(capsys, archive, place)
    assert run(capsys, tar_of(tmp_path / "b.tgz", ("secret", b"new")), place)[0] == 0
    assert (tmp_path / "neighbour" / "secret").read_bytes() == b"as it was" and not (place / "secret").is_symlink()


@pytest.mark.parametrize("name", ["a.tgz", "a.tar", "a.zip", "a.gz"])
def test_damage_anywhere(capsys, tmp_path, place, name):
    """Cut off at any place or with a byte changed: nothing is unpacked."""
    archive = tmp_path / name
    if name == "a.gz":
        archive.write_bytes(gzip.compress(NOISE))
    elif name == "a.zip":
        zip_of(archive, ("x", NOISE), ("y", NOISE))
    else:
        tar_of(archive, ("x", NOISE), ("y", NOISE), mode="w" if name == "a.tar" else "w:gz")
    whole = archive.read_bytes()
    for length in (20, 600, len(whole) // 3, len(whole) * 2 // 3, len(whole) - (20_000 if name == "a.tar" else 1)):
        archive.write_bytes(whole[:length])
        assert "damaged, truncated, or not an archive" in refused(capsys, archive, place)
    if name != "a.tar":  # which has checksums of headers only
        archive.write_bytes(whole[:50_000] + bytes([whole[50_000] ^ 1]) + whole[50_001:])
        assert "damaged, truncated, or not an archive" in refused(capsys, archive, place)


def test_a_bad_header_is_not_the_end(capsys, tmp_path, place):
    archive = tar_of(tmp_path / "a.tar", ("x", b"x"), ("y", NOISE), mode="w")
    whole = archive.read_bytes()
    archive.write_bytes(whole[:1024] + b"\xff" * 512 + whole[1536:])
    assert "a bad header" in refused(capsys, archive, place)


def test_what_is_no_archive(capsys, tmp_path, place):
    for name, content, words in (
        ("a.tgz", WEB_PAGE, "a web page (HTML) in place of an archive"),
        ("a.tar", WEB_PAGE, "a web page (HTML) in place of an archive"),
        ("a.gz", b"plain text", "something that is not gzip data"),
        ("a.zip", b"", "an empty file in place of an archive"),
        ("b.tar", b"plain text" * 100, "not an archive"),
        ("a.txt", b"x", "not the name of an archive; .tar, .tar.gz, .tgz, .zip, .gz are accepted"),
    ):
        (tmp_path / name).write_bytes(content)
        assert words in refused(capsys, tmp_path / name, place)
    assert "no such file" in refused(capsys, tmp_path / "none.tgz", place)


def test_nothing_matches(capsys, tmp_path, place):
    archive = tar_of(tmp_path / "a.tgz", ("x.en", b"x"))
    assert "no member matches *.de, y" in refused(capsys, archive, place, "*.en", "y", "*.de")
    assert "no member matches *" in refused(capsys, tar_of(tmp_path / "b.tgz"), place)


def test_no_space(capsys, tmp_path, place, monkeypatch):
    archive = tar_of(tmp_path / "a.tgz", ("x.en", NOISE))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 99_999))
    assert f"no space in {place}: 0.1 MB needed" in refused(capsys, archive, place)
    monkeypatch.undo()
    done = run_command(["bash", "-c", 'ulimit -f 50; exec "$@"', "-", "python", SCRIPT, archive, place])
    assert done.returncode == 1 and done.stderr == f"error: {archive}: {place}: File too large\n"
    assert tree(place) == {}


def test_memory_is_bounded(tmp_path, place):
    """200 MiB of zeros are unpacked by a process of 200 MiB of address space in all."""
    with gzip.open(tmp_path / "a.gz", "wb", compresslevel=1) as file:
        for _ in range(200):
            file.write(bytes(1 << 20))
    code = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2);"
    code += "del sys.argv[:2]; sys.path.insert(0, sys.argv[0].rpartition('/')[0]);"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = run_command(["python", "-c", code, 200 << 20, SCRIPT, tmp_path / "a.gz", place])
    assert done.returncode == 0, done.stderr
    assert os.path.getsize(place / "a") == 200 << 20
