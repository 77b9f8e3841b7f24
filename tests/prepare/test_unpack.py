"""What is unpacked, and that no archive writes outside the folder or passes with damage."""

import gzip
import io
import random
import subprocess
import sys
import tarfile

import pytest
from conftest import run_command
from loopback import WEB_PAGE

from fairseq_rskip.errors import exit_status
from fairseq_rskip.tools.prepare import unpack

FILES = {"training/é a.en": b"one\n" * 1000, "training/a.de": b"eins\n" * 1000, "./b.de-en.en": b"", "c d/e.txt": b"x"}
NOISE = random.Random(1).randbytes(100_000)


def tar_of(path, *members, mode="w:gz"):
    """A tar of (name, content) or (name, type, link name)."""
    with tarfile.open(path, mode) as tar:
        for name, content, *link in members:
            info = tarfile.TarInfo(name)
            if link:
                info.type, info.linkname = content, link[0]
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def place(tmp_path):
    """A folder whose neighbour shows what was written where."""
    (tmp_path / "neighbour").mkdir()
    (tmp_path / "neighbour" / "secret").write_bytes(b"as it was")
    return tmp_path / "út put"


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def run(place, capsys):
    """Unpack into ``place``; returns what was printed. ``error``: the one line that it must end in."""

    def unpacked(archive, *only, error=None):
        outside = tree(archive.parent / "neighbour")
        arguments = [str(archive), str(place), *(["--only", *only] if only else [])]
        status = exit_status(lambda: unpack.main(arguments))
        out, err = capsys.readouterr()
        assert tree(archive.parent / "neighbour") == outside
        if error is None:
            assert (status, err) == (0, "")
        else:
            assert status == 1 and len(err.splitlines()) == 1 and err.startswith(f"error: {archive}: "), err
            assert error in err, err
        return out

    return unpacked


@pytest.mark.parametrize("name", ["a.tgz", "a b.tar.gz", "ü.tar"])
def test_everything_is_unpacked(run, tmp_path, place, name):
    out = run(tar_of(tmp_path / name, *FILES.items(), mode="w" if name.endswith(".tar") else "w:gz"))
    assert "unpacked training/é a.en, 4,000 bytes\n" in out
    assert tree(place) == {name.removeprefix("./"): content for name, content in FILES.items()}


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["training/a.de"], ["training/a.de"]),
        (["*.en"], ["b.de-en.en", "training/é a.en"]),
        (["c*", "training/a.de"], ["c d/e.txt", "training/a.de"]),
    ],
    ids=["name", "ending", "two"],
)
def test_only(run, tmp_path, place, only, names):
    run(tar_of(tmp_path / "a.tgz", *FILES.items()), *only)
    assert sorted(tree(place)) == names
    run(tmp_path / "a.tgz", *only, "*.cs", "y", error="no member matches *.cs, y")


def test_system_tar_made_it(run, tmp_path, place):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.en").write_bytes(NOISE)
    subprocess.run(["tar", "-C", tmp_path, "-czf", tmp_path / "t.tgz", "in"], check=True)
    run(tmp_path / "t.tgz")
    assert tree(place) == {"in/x.en": NOISE}


SECRET = "../neighbour/secret"


@pytest.mark.parametrize(
    ("member", "error"),
    [
        ((SECRET, b"evil"), f"member {SECRET!r} leads out of the folder"),
        (("a/../../neighbour/new", b"evil"), "leads out of the folder"),
        (("/neighbour/new", b"evil"), "member '/neighbour/new' leads out of the folder"),
        (("..", b"evil"), "leads out of the folder"),
        (("bad\nname", tarfile.SYMTYPE, SECRET), "member 'bad\\nname' is a link, no regular file"),
        (("bad", tarfile.SYMTYPE, "good.en"), "member 'bad' is a link, no regular file"),
        (("bad", tarfile.LNKTYPE, SECRET), "member 'bad' is a link, no regular file"),
        (("bad", tarfile.CHRTYPE, ""), "member 'bad' is a device"),
        (("good.en", b"another"), "member 'good.en' is listed twice"),
        ((".//good.en", b"another"), "member 'good.en' is listed twice"),
    ],
    ids="parent hidden-parent absolute dots link-out link-in hard-link device twice same-name".split(),
)
def test_hostile_members(run, tmp_path, place, member, error):
    archive = tar_of(tmp_path / "a.tgz", ("good.en", b"x"), member)
    run(archive, error=f"refused: {error}" if error.startswith("member") else error)
    assert tree(place) == {"good.en": b"x"}


def test_a_link_that_is_not_unpacked_is_not_followed(run, tmp_path, place):
    run(tar_of(tmp_path / "a.tgz", ("d", tarfile.SYMTYPE, "../neighbour"), ("d/secret", b"new")), "d/*")
    assert tree(place) == {"d/secret": b"new"} and not (place / "d").is_symlink()


@pytest.mark.parametrize("name", ["a.tgz", "a.tar"])
def test_damage_anywhere(run, tmp_path, name):
    """Cut off at any place, with a byte changed, or with something after the end."""
    archive = tar_of(tmp_path / name, ("x", NOISE), ("y", NOISE), mode="w" if name == "a.tar" else "w:gz")
    whole = archive.read_bytes()
    broken = [whole[:length] for length in (20, 600, len(whole) // 3, len(whole) * 2 // 3)]
    broken += [whole + b"garbage", whole + bytes(2000) + b"garbage", whole + whole[:300]]
    if name == "a.tar":  # which has checksums of headers only
        second = 1024 + len(NOISE) // 512 * 512  # the end of x, and the header of y
        broken += [whole[:-20_000], whole[:second] + b"\xff" * 512 + whole[second + 512 :]]
    else:
        broken += [whole[:-1], whole[:50_000] + bytes([whole[50_000] ^ 1]) + whole[50_001:]]
    for content in broken:
        archive.write_bytes(content)
        run(archive, error="damaged, truncated, or not an archive")


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.tgz", WEB_PAGE, "not an archive"),
        ("a.tar", WEB_PAGE, "not an archive"),
        ("a.tar", b"plain text" * 100, "not an archive"),
        ("a.tgz", b"", "not an archive"),
        ("b.tgz", gzip.compress(bytes(10_240)), "no member matches *"),
        ("none.tgz", None, "No such file"),
    ],
    ids=["html.tgz", "html.tar", "text", "empty", "no members", "no file"],
)
def test_what_is_no_archive(run, tmp_path, name, content, error):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    run(tmp_path / name, error=error)


def test_an_old_python_is_named(run, tmp_path, monkeypatch):
    archive = tar_of(tmp_path / "a.tgz", ("x.en", b"x"))
    monkeypatch.delattr(tarfile, "data_filter")
    with pytest.raises(ValueError, match="3.9.17, 3.10.12, 3.11.4 or newer is needed"):
        unpack.unpack(archive, tmp_path, ["*"])


def test_no_space_and_no_more_memory_than_a_little(tmp_path, place):
    """200 MiB of zeros: unpacked in 250 MiB of address space; a limit on the size of files stands for a full disk."""
    with gzip.open(tmp_path / "a.tgz", "wb", compresslevel=1) as file:
        info = tarfile.TarInfo("zeros")
        info.size = 200 << 20
        file.write(info.tobuf())
        for _ in range(200):
            file.write(bytes(1 << 20))
        file.write(bytes(1024))
    command = [sys.executable, "-m", "fairseq_rskip.tools.prepare.unpack", tmp_path / "a.tgz", place]
    done = run_command(["bash", "-c", 'ulimit -f 50; exec "$@"', "-", *command])
    assert done.returncode == 1 and done.stderr == f"error: {place}: File too large\n"
    done = run_command(["bash", "-c", 'ulimit -v 256000; exec "$@"', "-", *command])
    assert done.returncode == 0, done.stderr
    assert (place / "zeros").stat().st_size == 200 << 20
