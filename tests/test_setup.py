"""scripts/setup_env.sh with a stand-in interpreter and pip, and what `pip install .` really leaves behind."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

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
  *build_fairseq.py*) [ ! -e FAIL_BUILD ] || exit 1; echo /cache/fairseq.whl ;;
  *) exit 9 ;;
esac
"""


class Clone:
    """A copy of the files that set-up reads, in a folder whose name is hard on shells."""

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
        for name in ("LOG", "HANG_PIP", "FAIL_PIP", "NO_VENV", "READ_ONLY", "FAIL_BUILD"):
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
    assert command == "-m pip install -c constraints.txt /cache/fairseq.whl -e .[test,experiments,reproduce,vision]"
    began = time.monotonic()
    again = clone.run("echo", "two  words", version=None)
    assert (again.returncode, again.stdout, again.stderr) == (0, "two  words\n", "")
    assert time.monotonic() - began < 1
    assert clone.pip_installs() == 1


def test_status_of_the_command_is_kept(clone):
    assert clone.run("sh", "-c", "exit 7").returncode == 7


@pytest.mark.parametrize(
    "name",
    [
        "constraints.txt",
        "setup.py",
        "pyproject.toml",
        "patches/series",
        "fairseq_rskip/tools/build_fairseq.py",
        "fairseq_rskip/compat.py",
        "fairseq_rskip/safe_load.py",
    ],
)
def test_changed_input_installs_again_in_place(clone, name):
    clone.run()
    (clone.root / ".venv" / "kept").touch()
    with (clone.root / name).open("a") as file:
        file.write("# changed\n")
    assert clone.run().returncode == 0
    log = (clone.switches / "log").read_text().splitlines()
    assert log[1] == log[0]
    assert log[2:] == ["-m pip install --quiet --force-reinstall --no-deps /cache/fairseq.whl"]
    assert (clone.root / ".venv" / "kept").exists()
    assert clone.run().stderr == ""


@pytest.mark.parametrize("failure", ["fail_build", "fail_pip"])
def test_failed_update_keeps_the_environment(clone, failure):
    """Off line, an edited input must not cost the environment that is there."""
    clone.run()
    (clone.root / ".venv" / "kept").touch()
    with (clone.root / "setup.py").open("a") as file:
        file.write("# changed\n")
    clone.switch(failure)
    for _ in range(2):
        one_error(clone.run(CXX="true"), "above")
    (clone.switches / failure).unlink()
    assert clone.run().returncode == 0
    assert (clone.root / ".venv" / "kept").exists()


def test_other_interpreter_makes_the_environment_anew(clone):
    clone.run(version="3.11")
    (clone.root / ".venv" / "left-over").touch()
    result = clone.run(version="3.12")
    assert result.returncode == 0
    assert "anew: it holds Python 3.11, and 3.12 is asked for" in result.stderr
    assert not (clone.root / ".venv" / "left-over").exists()
    # Without PYTHON the environment stays what it is.
    assert clone.run(version=None).stderr == ""
    assert clone.pip_installs() == 2


def test_cut_off_set_up_is_repaired(clone):
    """Killed in the middle of pip, as Ctrl-C or a closed terminal would."""
    clone.switch("hang_pip")
    process = subprocess.Popen(
        [clone.script], env=clone.environment(), stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 30
    while clone.pip_installs() == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) != 0
    (clone.root / ".venv" / "half").touch()
    (clone.switches / "hang_pip").unlink()
    result = clone.run()
    assert result.returncode == 0
    assert "anew: its set-up was cut off" in result.stderr
    assert not (clone.root / ".venv" / "half").exists()
    assert clone.run().stderr == ""


def test_pip_failure_is_one_clear_line(clone):
    clone.switch("fail_pip")
    one_error(clone.run(), "pip could not install", "network")
    (clone.switches / "fail_pip").unlink()
    assert clone.run().returncode == 0


def test_moved_clone_is_noticed(clone):
    clone.run()
    clone.root = clone.root.rename(clone.root.with_name("moved"))
    result = clone.run()
    assert result.returncode == 0
    assert "anew: it was moved or damaged" in result.stderr


def test_vanished_interpreter_is_noticed(clone):
    clone.run()
    (clone.root / ".venv/bin/python").unlink()
    result = clone.run()
    assert result.returncode == 0
    assert "anew: its interpreter is gone" in result.stderr


def test_second_environment_beside_the_first(clone):
    clone.run(version="3.11")
    result = clone.run("sh", "-c", 'echo "$VIRTUAL_ENV"', version="3.12", RSKIP_VENV=".venv-py312")
    assert result.stdout.strip() == str(clone.root / ".venv-py312")
    assert clone.run(version="3.11").stderr == ""


@pytest.mark.parametrize("version", ["3.8", "3.14", "2.7"])
def test_unsupported_interpreter(clone, version):
    one_error(clone.run(version=version), f"Python {version}", "3.9 to 3.13")
    assert not (clone.root / ".venv").exists()


def test_interpreter_that_does_not_exist(clone):
    one_error(clone.run(version=None, PYTHON="no-such-python"), "PYTHON=no-such-python")


def test_missing_venv_module(clone):
    clone.switch("no_venv")
    one_error(clone.run(version="3.12"), "venv module", "apt-get install python3.12-venv")
    assert not (clone.root / ".venv").exists()


def test_missing_compiler_is_named(clone, tmp_path):
    clone.switch("fail_build")
    tools = tmp_path / "tools"
    tools.mkdir()
    names = ["bash", "cat", "chmod", "cp", "cut", "dirname", "find", "mkdir", "mv", "sha256sum", "sort"]
    for name in names:
        (tools / name).symlink_to(shutil.which(name))
    one_error(clone.run(PATH=str(tools)), "C++ compiler", "apt-get install g++")


def test_missing_headers_are_named(clone):
    clone.switch("fail_build")
    (clone.switches / "include" / "Python.h").unlink()
    one_error(clone.run(version="3.12", CXX="true"), "Python.h", "apt-get install python3.12-dev")


def test_failed_build_is_reported(clone):
    clone.switch("fail_build")
    one_error(clone.run(CXX="true"), "fairseq could not be built")


def test_foreign_environment_is_left_alone(clone):
    (clone.root / ".venv").mkdir()
    (clone.root / ".venv" / "mine").touch()
    one_error(clone.run(), "was not made by this script", "RSKIP_VENV=none")
    assert (clone.root / ".venv" / "mine").exists()


def test_active_environment(clone):
    """RSKIP_VENV=none installs into the interpreter's own environment and makes no .venv."""
    venv = clone.root.parent / "active"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    shim = venv / "bin" / "pip-shim"
    shim.write_text(
        f'#!/bin/bash\ncase "$*" in "-m pip"*) echo "$*" >> "{clone.switches}/log" ;; '
        f'*build_fairseq.py) echo /cache/fairseq.whl ;; *) exec "{venv}/bin/python" "$@" ;; esac\n'
    )
    shim.chmod(0o755)
    for _ in range(2):
        result = clone.run("sh", "-c", "command -v python", version=None, RSKIP_VENV="none", PYTHON=str(shim))
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == str(venv / "bin" / "python")
    assert clone.pip_installs() == 1
    assert (venv / ".rskip-setup").exists() and not (clone.root / ".venv").exists()


def test_system_python_is_refused_as_active_environment(clone):
    clone.switch("read_only")
    one_error(clone.run(RSKIP_VENV="none"), "is read-only", "activate a virtual or conda environment")
    assert clone.pip_installs() == 0


def test_usage_and_unknown_option(clone):
    assert "RSKIP_VENV=none" in clone.run("-h").stdout
    one_error(clone.run("--wrong"), "--wrong")


@pytest.mark.slow
def test_installed_package_prints_its_user_dir(tmp_path):
    """A real install holds every module, and prints its own folder where there is neither torch nor fairseq."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "demo", "__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=ignored)
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(source)]
    subprocess.run(install, check=True, timeout=300)
    installed = {p.relative_to(target).as_posix() for p in target.glob("fairseq_rskip/**/*.py")}
    assert installed == {p.relative_to(ROOT).as_posix() for p in ROOT.glob("fairseq_rskip/**/*.py")}
    # -S and -I shut out every other site-packages: neither torch nor fairseq can be found.
    code = "import sys, runpy; sys.path.insert(0, sys.argv[1]); runpy.run_module('fairseq_rskip', None, '__main__')"
    command = [sys.executable, "-I", "-S", "-c", code.replace("sys.argv[1]", repr(str(target)))]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=tmp_path).stdout
    assert printed == f"{target / 'fairseq_rskip'}\n"


def test_user_dir_and_version_from_the_source_tree(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def call(*options):
        command = [sys.executable, "-m", "fairseq_rskip", *options]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert call().stdout == f"{ROOT / 'fairseq_rskip'}\n"
    assert call("--version").stdout == "fairseq_rskip 0.1.0\n"
    assert call("--wrong").returncode == 2
