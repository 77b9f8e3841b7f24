"""The program that patches and builds fairseq: its patches, its errors, its cache."""

import sys
import tarfile
from pathlib import Path

import pytest
from conftest import ROOT, run_command

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import build_fairseq as program

LINES = [f"line {number}\n" for number in range(1, 10)]
PATCH = """Description: why

--- a/f.py
+++ b/f.py
@@ -2,3 +2,4 @@ in a function
 line 2
-line 3
+line three
+line three and a half
 line 4
@@ -9 +10 @@
-line 9
+line nine
"""


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
        pytest.param([], False, id="no-such-file"),
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
        after = "".join(before).replace("line 3", "line three\nline three and a half").replace("line 9", "line nine")
        assert (tree / "f.py").read_text() == after
    else:
        with pytest.raises(UserError, match="why.patch does not apply exactly"):
            program.apply_patch(patch, tree)
        assert not before or (tree / "f.py").read_text() == "".join(before)


@pytest.fixture
def small_build(tmp_path, monkeypatch):
    """An archive of one file in place of PyPI's, a patch for it, and a pip whose wheel is that file."""
    root = tmp_path / f"fairseq-{program.VERSION}"
    (root / "fairseq").mkdir(parents=True)
    (root / "f.py").write_text("".join(LINES))
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "series").write_text("# comment\nwhy.patch\n")
    (tmp_path / "patches" / "why.patch").write_text(PATCH)

    def run_pip(arguments, purpose):
        folder, wheel = Path(arguments[-2]), program.cached_wheel().name
        if arguments[0] == "download":
            with tarfile.open(Path(arguments[-1]) / program.SDIST, "w:gz") as tar:
                tar.add(root, root.name)
        else:
            (folder / wheel).write_bytes((Path(arguments[-1]) / "f.py").read_bytes())

    monkeypatch.setattr(program, "PATCHES", tmp_path / "patches")
    monkeypatch.setattr(program, "run_pip", run_pip)
    monkeypatch.setattr(program, "missing_packages", lambda: [])
    monkeypatch.setenv("RSKIP_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_a_build_is_cached_until_anything_in_it_changes(small_build, capsys):
    def built():
        assert program.main([]) == 0
        printed = capsys.readouterr()
        return Path(printed.out.strip()), printed.err

    wheel, messages = built()
    assert "line three" in wheel.read_text() and "building" in messages
    assert built() == (wheel, "") and list(wheel.parent.iterdir()) == [wheel]
    (small_build / "patches" / "why.patch").write_text(PATCH.replace("half", "bit"))
    assert "bit" in built()[0].read_text()
    (small_build / "patches" / "why.patch").write_text(PATCH)
    assert built() == (wheel, "")


def test_a_build_without_its_tools_or_with_a_patch_that_does_not_fit_leaves_no_wheel(small_build, capsys, monkeypatch):
    (small_build / "patches" / "why.patch").write_text(PATCH.replace("line 4", "line 5"))
    assert program.main([]) == 1 and "why.patch does not apply exactly" in capsys.readouterr().err
    monkeypatch.setattr(program, "missing_packages", lambda: ["g++", "python3.11-dev"])
    assert program.main([]) == 1 and capsys.readouterr().err.endswith("apt-get install g++ python3.11-dev\n")
    assert not (small_build / "cache").exists()


def test_missing_tools_are_named_together(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RSKIP_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(program.sysconfig, "get_path", lambda _: str(tmp_path))
    assert program.main(["--missing"]) == 0
    assert capsys.readouterr().out == f"g++ python3.{sys.version_info.minor}-dev\n"


def test_a_failure_of_pip_shows_its_last_lines():
    with pytest.raises(UserError, match="pip cannot do that .*\nERROR: unknown command"):
        program.run_pip(["no-such-command"], "do that")


def test_a_cached_wheel_is_printed_without_any_third_party_package(tmp_path, monkeypatch):
    monkeypatch.setenv("RSKIP_CACHE", str(tmp_path))
    program.cached_wheel().touch()
    done = run_command([sys.executable, "-S", "-m", "fairseq_rskip.tools.build_fairseq"], cwd=ROOT, timeout=10)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{program.cached_wheel()}\n", "")


def test_fairseq_reads_optional_types_as_python_3_14_prints_them():
    utils = pytest.importorskip("fairseq.dataclass.utils")
    assert utils.interpret_dc_type(int | None) is int and utils.interpret_dc_type(int) is int
