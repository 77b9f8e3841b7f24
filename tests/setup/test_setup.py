"""scripts/setup_env.sh with a stand-in interpreter and pip; what an sdist and an installed package hold."""

import importlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from conftest import ROOT, run_checked, run_command

from fairseq_rskip.tools import __main__ as rskip

# Real Python runs the script's probes under a version of our choice; venv and pip only leave a trace.
STAND_IN = """#!/bin/bash
version=$(cat "$0.version" 2>/dev/null || echo FAKE_VERSION)
case "$1 ${2:-}" in
  "-m venv")
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    echo "$version" > "$3/bin/python.version"
    printf '#!/bin/bash\\n[ -x "%s/bin/python" ]\\n' "$3" > "$3/bin/pip"
    chmod +x "$3/bin/pip"
    ;;
  "-m pip")
    echo "$*" >> LOG
    [ ! -e HANG_PIP ] || exec sleep 60
    [ ! -e FAIL_PIP ] || [ "$3" != install ] || { echo "no route to host" >&2; exit 1; }
    ;;
  "-c "*)
    prelude="import sys, sysconfig; sysconfig.get_path = lambda _: 'INCLUDE'"
    prelude="$prelude; sys.version_info = (*map(int, '$version'.split('.')), 1)"
    [ ! -e NO_VENV ] || prelude="$prelude; sys.modules['ensurepip'] = None"
    [ ! -e READ_ONLY ] || prelude="$prelude; import os; os.access = lambda *_: False"
    exec REAL_PYTHON -c "$prelude
exec(sys.argv.pop(1))" "$2"
    ;;
  "-m fairseq_rskip.ops") [ ! -e FAIL_OPS ] ;;
  *build_fairseq.py*) [ ! -e FAIL_BUILD ] || exit 1; echo /cache/fairseq.whl ;;
  *) exit 9 ;;
esac
"""


class Clone:
    """A clone with what set-up reads, in a folder whose name is hard on shells; ``switches`` make its tools fail."""

    def __init__(self, folder: Path):
        self.root = folder / "số đếm's clone"
        self.switches = folder / "switches"
        (self.switches / "include").mkdir(parents=True)
        (self.switches / "include" / "Python.h").touch()
        for name in ("constraints.txt", "setup.py", "pyproject.toml"):
            self.root.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.root)
        for folder in ("fairseq_rskip", "patches", "scripts"):
            shutil.copytree(ROOT / folder, self.root / folder, ignore=shutil.ignore_patterns("__pycache__"))

    def interpreter(self, version: str) -> str:
        path = self.switches / f"python{version}"
        text = STAND_IN.replace("REAL_PYTHON", f"'{sys.executable}'").replace("FAKE_VERSION", version)
        for name in ("LOG", "HANG_PIP", "FAIL_PIP", "NO_VENV", "READ_ONLY", "FAIL_BUILD", "FAIL_OPS"):
            text = text.replace(name, f"'{self.switches / name.lower()}'")
        path.write_text(text.replace("INCLUDE", str(self.switches / "include")), encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    def environment(self, version="3.11", **variables):
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "RSKIP_VENV", "VIRTUAL_ENV", "CXX")}
        if version is not None:
            environment["PYTHON"] = self.interpreter(version)
        return {**environment, **variables}

    @property
    def script(self) -> str:
        return str(self.root / "scripts" / "setup_env.sh")

    def run(self, *command, **variables):
        environment = self.environment(**variables)
        return subprocess.run([self.script, *command], env=environment, capture_output=True, text=True, timeout=60)

    def pip_installs(self) -> int:
        log = self.switches / "log"
        return sum(" install " in line for line in log.read_text().splitlines()) if log.exists() else 0

    def switch(self, name: str) -> None:
        (self.switches / name).touch()


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


def one_error(result, *words):
    """The last line is the error, it names all the words, the status says failure."""
    assert result.returncode != 0
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("set-up: error: "), result.stderr
    for word in words:
        assert word in line
    assert "Traceback" not in result.stderr


def test_fresh_then_unchanged(clone):
    first = clone.run("sh", "-c", 'echo "$VIRTUAL_ENV"; command -v python')
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines() == [str(clone.root / ".venv"), str(clone.root / ".venv/bin/python")]
    command = (clone.switches / "log").read_text().splitlines()[-1]
    extras = "test,experiments,notebook,reproduce,share,vision"
    switches = "-c constraints.txt --config-settings editable_mode=compat"
    assert command == f"-m pip install {switches} /cache/fairseq.whl -e .[{extras}]"
    began = time.monotonic()
    again = clone.run("echo", "two  words", version=None)
    assert (again.returncode, again.stdout, again.stderr) == (0, "two  words\n", "")
    assert time.monotonic() - began < 1
    assert clone.run("sh", "-c", "exit 7").returncode == 7
    assert clone.pip_installs() == 1


def test_changed_input_installs_again_in_place(clone):
    clone.run()
    (clone.root / ".venv" / "kept").touch()
    own = [f"fairseq_rskip/{name}.py" for name in ("compat", "errors", "safe_load", "tools/build_fairseq")]
    changed = ["constraints.txt", "setup.py", "pyproject.toml", "patches/series", "scripts/setup_env.sh", *own]
    for number, name in enumerate(changed):
        with (clone.root / name).open("a") as file:
            file.write("# changed\n")
        assert clone.run(version=None).returncode == 0
        assert clone.pip_installs() == number + 2, name
    assert (clone.root / ".venv" / "kept").exists()
    assert clone.run().stderr == ""


@pytest.mark.parametrize(
    ("failure", "words"),
    [("fail_build", ["fairseq could not be built", "above"]), ("fail_pip", ["pip could not install", "no network"])],
    ids=["build", "pip"],
)
def test_failure_is_one_line_and_costs_no_environment_that_is_there(clone, failure, words):
    """Off line, say, the first time or after an edit."""
    clone.switch(failure)
    one_error(clone.run(), *words)
    (clone.switches / failure).unlink()
    assert clone.run().returncode == 0
    (clone.root / ".venv" / "kept").touch()
    with (clone.root / "setup.py").open("a") as file:
        file.write("# changed\n")
    clone.switch(failure)
    for _ in range(2):
        one_error(clone.run(), *words)
    (clone.switches / failure).unlink()
    assert clone.run().returncode == 0
    assert (clone.root / ".venv" / "kept").exists()


def test_fused_operator_is_built_ahead_and_is_no_condition(clone):
    clone.switch("fail_ops")
    result = clone.run("echo", "ready")
    assert (result.returncode, result.stdout) == (0, "ready\n")
    assert "set-up: warning: the fused operator could not be built" in result.stderr
    assert clone.run().stderr == ""


def test_other_interpreter_makes_the_environment_anew_unless_it_has_its_own(clone):
    clone.run(version="3.11")
    (clone.root / ".venv" / "left-over").touch()
    beside = clone.run("sh", "-c", 'echo "$VIRTUAL_ENV"', version="3.12", RSKIP_VENV=".venv-py312")
    assert beside.stdout.strip() == str(clone.root / ".venv-py312")
    assert clone.run(version="3.11").stderr == ""
    result = clone.run(version="3.12")
    assert result.returncode == 0
    assert "anew: it holds Python 3.11, and 3.12 is asked for" in result.stderr
    assert not (clone.root / ".venv" / "left-over").exists()
    # Without PYTHON the environment stays what it is.
    assert clone.run(version=None).stderr == ""
    assert clone.pip_installs() == 3


def test_cut_off_set_up_is_repaired(clone):
    """Killed in the middle of pip, as Ctrl-C or a closed terminal would."""
    clone.switch("hang_pip")
    process = subprocess.Popen(
        [clone.script], env=clone.environment(), stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 30
    while clone.pip_installs() == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) != 0
    (clone.root / ".venv" / "half").touch()
    (clone.switches / "hang_pip").unlink()
    result = clone.run()
    assert result.returncode == 0
    assert "anew: its set-up was cut off" in result.stderr
    assert not (clone.root / ".venv" / "half").exists()
    assert clone.run().stderr == ""


def test_moved_clone_and_vanished_interpreter_are_noticed(clone):
    clone.run()
    clone.root = clone.root.rename(clone.root.with_name("moved"))
    result = clone.run()
    assert result.returncode == 0
    assert "anew: it was moved or damaged" in result.stderr
    (clone.root / ".venv/bin/python").unlink()
    result = clone.run()
    assert result.returncode == 0
    assert "anew: its interpreter is gone" in result.stderr


def test_interpreters_that_will_not_do(clone):
    for version in ("3.8", "3.14", "2.7"):
        one_error(clone.run(version=version), f"Python {version}", "3.9 to 3.13")
    one_error(clone.run(version=None, PYTHON="no-such-python"), "PYTHON=no-such-python")
    clone.switch("no_venv")
    one_error(clone.run(version="3.12"), "venv module", "apt-get install python3.12-venv")
    assert not (clone.root / ".venv").exists()


def test_active_environment(clone):
    """RSKIP_VENV=none installs into the interpreter's own environment and makes no .venv."""
    venv = clone.root.parent / "active"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    shim = venv / "bin" / "pip-shim"
    shim.write_text(
        f'#!/bin/bash\ncase "$*" in "-m pip"*) echo "$*" >> "{clone.switches}/log" ;; "-m fairseq"*) ;; '
        f'*build_fairseq.py) echo /cache/fairseq.whl ;; *) exec "{venv}/bin/python" "$@" ;; esac\n'
    )
    shim.chmod(0o755)
    for _ in range(2):
        result = clone.run("sh", "-c", "command -v python", version=None, RSKIP_VENV="none", PYTHON=str(shim))
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == str(venv / "bin" / "python")
    assert clone.pip_installs() == 1
    assert (venv / ".rskip-setup").exists() and not (clone.root / ".venv").exists()


def test_what_it_refuses_before_it_installs(clone):
    assert "RSKIP_VENV=none" in clone.run("-h").stdout
    one_error(clone.run("--wrong"), "--wrong")
    clone.switch("read_only")
    one_error(clone.run(RSKIP_VENV="none"), "is read-only", "activate a virtual or conda environment")
    (clone.root / ".venv").mkdir()
    one_error(clone.run(), "was not made by this script", "RSKIP_VENV=none")
    assert (clone.root / ".venv").exists() and clone.pip_installs() == 0


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """(folder of an unpacked sdist, the files it was made from), made from what git tracks."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    tracked = run_checked(["git", "ls-files"], cwd=ROOT).splitlines()
    tracked = {name for name in tracked if (ROOT / name).is_file()}
    folder = tmp_path_factory.mktemp("sdist")
    for name in tracked:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    program = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run_checked([sys.executable, "-c", program, folder], cwd=folder / "source")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder / "unpacked")
    return next((folder / "unpacked").iterdir()), tracked


def test_an_sdist_holds_all_that_the_tests_need(sdist):
    folder, tracked = sdist
    packed = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert tracked - packed == set()
    more = {name for name in packed - tracked if "egg-info" not in name}
    assert more == {"PKG-INFO", "setup.cfg"}


@pytest.mark.slow
def test_an_installed_package_is_whole_and_prints_its_user_dir(sdist, tmp_path):
    """It holds every file of the package, and prints its own folder where there is neither torch nor fairseq."""
    folder, tracked = sdist
    target = tmp_path / "site"
    run_checked([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, folder])
    installed = {p.relative_to(target).as_posix() for p in target.glob("fairseq_rskip/**/*") if p.is_file()}
    assert {name for name in installed if not name.endswith(".pyc")} == {
        name for name in tracked if name.startswith("fairseq_rskip/")
    }
    assert (target / "bin" / "rskip").exists()
    # -S shuts out every other site-packages: neither torch nor fairseq can be found.
    command = [sys.executable, "-S", "-m", "fairseq_rskip"]
    printed = run_checked(command, cwd=tmp_path, env={"PYTHONPATH": str(target)})
    assert printed == f"{target / 'fairseq_rskip'}\n"


def test_a_folder_of_the_packages_name_is_not_taken_for_it(tmp_path):
    """A checkout is one, for whoever stands beside it."""
    (tmp_path / "fairseq_rskip").mkdir()
    plugin = run_command([sys.executable, "-m", "fairseq_rskip"], cwd=tmp_path).stdout.strip()
    assert plugin == str(ROOT / "fairseq_rskip")


def test_rskip_calls_every_command_by_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rskip"])
    assert rskip.main([]) == 0
    usage = capsys.readouterr().out
    for name, (module, purpose) in rskip.COMMANDS.items():
        assert name in usage and purpose in usage
        given = []
        monkeypatch.setattr(importlib.import_module(module), "main", lambda argv, given=given: given.append(argv) or 3)
        assert rskip.main([name, "--seed", "1"]) == 3 and given == [["--seed", "1"]]
    assert rskip.main(["trian"]) == 2
    assert capsys.readouterr().err.startswith("error: rskip has no command 'trian'; it has train, ")
