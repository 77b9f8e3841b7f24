"""The program that patches and builds fairseq: its patches, its errors, its cache."""

import hashlib
import importlib.util
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
from conftest import ROOT, run_command

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import build_fairseq as program

LINES = [f"line {number}\n" for number in range(1, 10)]
PATCH = "Description: why\n\n--- a/f.py\n+++ b/f.py\n@@ -2,3 +2,3 @@\n line 2\n-line 3\n+line three\n line 4\n"


def test_the_series_names_every_patch_and_each_says_why():
    assert sorted(program.series()) == sorted(program.PATCHES.glob("*.patch"))
    for patch in program.series():
        assert patch.read_text(encoding="utf-8").startswith("Description: "), patch.name


@pytest.mark.parametrize(
    ("before", "fits"),
    [
        pytest.param(LINES, True, id="as-published"),
        pytest.param(["new\n", *LINES], False, id="moved-by-a-line"),
        pytest.param([line.replace("line 2", "other") for line in LINES], False, id="other-context"),
        pytest.param([line.replace("line 3", "line three") for line in LINES], False, id="applied-already"),
        pytest.param(None, False, id="no-such-file"),
    ],
)
def test_a_patch_applies_exactly_or_not_at_all(tmp_path, before, fits):
    patch, tree = tmp_path / "why.patch", tmp_path / "tree"
    patch.write_text(PATCH)
    tree.mkdir()
    if before:
        (tree / "f.py").write_text("".join(before))
    if fits:
        program.apply_patch(patch, tree)
        assert (tree / "f.py").read_text() == "".join(before).replace("line 3", "line three")
    else:
        with pytest.raises(UserError, match="why.patch does not apply exactly"):
            program.apply_patch(patch, tree)


def test_a_missing_patch_program_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="apt-get install patch"):
        program.apply_patch(tmp_path / "why.patch", tmp_path)


@pytest.mark.skipif(
    importlib.util.find_spec("fairseq._today") is None, reason="fairseq did not come from scripts/build_fairseq.py"
)
def test_the_installed_wheel_is_the_archive_with_these_very_patches_and_files(tmp_path):
    installed = Path(importlib.util.find_spec("fairseq").origin).parent
    for package in ("fairseq", "fairseq_cli"):
        shutil.copytree(installed.parent / package, tmp_path / package, ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    for name, copy in program.COPIES.items():
        assert (installed / copy).read_bytes() == (program.PACKAGE / name).read_bytes(), "build the wheel again"
    for patch in reversed(program.series()):
        if patch.name != "build.patch":  # of files that are not in a wheel
            program.apply_patch(patch, tmp_path, "-R")


def refused(capsys, *options):
    """The error of the program, which prints nothing else."""
    assert program.main([str(option) for option in options]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_a_wrong_archive_is_one_line_with_both_hashes(tmp_path, capsys):
    wrong = tmp_path / program.SDIST
    wrong.write_bytes(b"something else")
    error = refused(capsys, "--sdist", wrong, "--cache", tmp_path / "cache")
    assert len(error.splitlines()) == 1
    assert program.SHA256 in error and hashlib.sha256(b"something else").hexdigest() in error
    assert "No such file" in refused(capsys, "--sdist", tmp_path / "none.tar.gz", "--cache", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def archive(folder, monkeypatch):
    """A small sdist that the program takes for PyPI's, with one patch for it."""
    root = folder / "fairseq-0.12.2"
    (root / "fairseq").mkdir(parents=True)
    (root / "f.py").write_text("".join(LINES))
    with tarfile.open(folder / program.SDIST, "w:gz") as tar:
        tar.add(root, root.name)
    (folder / "patches").mkdir()
    (folder / "patches" / "series").write_text("# comment\nwhy.patch\n")
    (folder / "patches" / "why.patch").write_text(PATCH)
    monkeypatch.setattr(program, "PATCHES", folder / "patches")
    monkeypatch.setattr(program, "SHA256", hashlib.sha256((folder / program.SDIST).read_bytes()).hexdigest())
    return folder / program.SDIST


def fake_pip(monkeypatch, fails=False):
    """pip makes a wheel that holds what it found, or fails."""

    def run_pip(arguments, purpose):
        if fails:
            raise UserError(f"pip failed to {purpose}")
        root, out = Path(arguments[-1]), Path(arguments[arguments.index("--wheel-dir") + 1])
        out.mkdir()
        version = (root / "fairseq" / "version.txt").read_text().strip()
        shutil.copy(root / "f.py", out / f"fairseq-{version}-cp3-none-any.whl")

    monkeypatch.setattr(program, "run_pip", run_pip)


def test_a_build_is_cached_until_anything_in_it_changes(tmp_path, monkeypatch, capsys):
    sdist = archive(tmp_path, monkeypatch)
    package = shutil.copytree(program.PACKAGE, tmp_path / "package")
    monkeypatch.setattr(program, "PACKAGE", package)
    options = ["--sdist", str(sdist), "--cache", str(tmp_path / "cache")]

    def built(*more):
        assert program.main([*options, *more]) == 0
        printed = capsys.readouterr()
        return Path(printed.out.strip()), printed.err

    fake_pip(monkeypatch)
    wheel, messages = built()
    assert "line three" in wheel.read_text() and "building" in messages
    assert built() == (wheel, "")
    wheel.write_text("other")
    again, _ = built("--force")
    assert again == wheel and "line three" in wheel.read_text()
    assert [path.name for path in wheel.parent.iterdir()] == [wheel.name]
    for changed in (*(package / name for name in program.COPIES), tmp_path / "patches" / "why.patch"):
        text = changed.read_text(encoding="utf-8")
        changed.write_text(text.replace("\n", "\n ", 1) if changed.suffix == ".patch" else text + "\n")
        assert built()[0] != wheel, changed
        changed.write_text(text, encoding="utf-8")
        assert built() == (wheel, "")


def test_a_source_that_the_patches_do_not_fit_leaves_no_wheel(tmp_path, monkeypatch, capsys):
    sdist = archive(tmp_path, monkeypatch)
    (tmp_path / "patches" / "why.patch").write_text(PATCH.replace("line 4", "line 5"))
    assert "why.patch does not apply exactly" in refused(capsys, "--sdist", sdist, "--cache", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("missing", ["c++", "Python.h", "nothing"])
def test_a_failed_build_names_what_is_missing(tmp_path, monkeypatch, capsys, missing):
    sdist = archive(tmp_path, monkeypatch)
    fake_pip(monkeypatch, fails=True)
    monkeypatch.setattr(program.shutil, "which", lambda name: None if missing == "c++" else name)
    monkeypatch.setattr(program.sysconfig, "get_path", lambda _: str(tmp_path / "include"))
    if missing != "Python.h":
        (tmp_path / "include").mkdir()
        (tmp_path / "include" / "Python.h").touch()
    error = refused(capsys, "--sdist", sdist, "--cache", tmp_path / "cache").splitlines()
    minor = sys.version_info[1]
    words = {"c++": "install g++", "Python.h": f"install python3.{minor}-dev", "nothing": "pip's last lines are above"}
    assert error[-2] == "pip failed to build the wheel" and words[missing] in error[-1]


@pytest.mark.parametrize(
    "command", [[ROOT / "scripts" / "build_fairseq.py"], ["-S", "-m", "fairseq_rskip.tools.build_fairseq"]],
    ids=["script", "without-third-party-packages"],
)
def test_a_cached_wheel_is_printed_at_once_and_alone(tmp_path, command, monkeypatch):
    monkeypatch.setenv("RSKIP_CACHE", str(tmp_path))
    place = tmp_path / program.platform()
    place.mkdir()
    wheel = place / f"fairseq-{program.wheel_version()}-cp3-none-any.whl"
    wheel.touch()
    done = run_command([sys.executable, *command], cwd=tmp_path, timeout=10)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{wheel}\n", "")
