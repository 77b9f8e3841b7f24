"""Run a command as a child process: read its output, end it with this process, explain failures."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from fairseq_rskip.errors import UserError
from fairseq_rskip.machine import memory_variables

PLUGIN = Path(__file__).resolve().parents[1]  # the package, fairseq's --user-dir
EXPERIMENTS = "experiments"  # the folder of the paper's tables, in a checkout


def find_checkout() -> Path:
    """The folder with experiments/ and data-prep/: around the package, or the current folder, where
    the package is installed and this is a checkout of it.
    """
    is_installed = not (PLUGIN.parent / EXPERIMENTS).is_dir()
    if is_installed and Path(EXPERIMENTS).is_dir() and Path(PLUGIN.name).is_dir():
        return Path.cwd()
    return PLUGIN.parent


CHECKOUT = find_checkout()
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_NOT_FINITE = re.compile(r"FloatingPointError|\bnan\b|not finite|Minimum loss scale", re.IGNORECASE)
GRACE = 10.0  # seconds that a process has to end by itself
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal has asked this process to end; ``status`` is the exit status for a shell."""

    def __init__(self, number: int):
        self.status = 128 + number


def stop_on_signals() -> None:
    """Have Ctrl-C, SIGTERM and SIGHUP raise ``Stopped``, so that unfinished files are removed.

    SIGTERM and SIGHUP do so once: a second one would end what the first has begun to clean up.
    """

    def stop(number: int, frame: object) -> None:
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_IGN)
        raise Stopped(number)

    for number in _STOPPING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, stop)


def end_with_parent(number: int) -> None:
    """Have the system send signal ``number`` to this process when its parent ends, on Linux."""
    if _LIBC:
        _LIBC.prctl(1, number)  # PR_SET_PDEATHSIG of <linux/prctl.h>


def follow(
    command: Sequence[str],
    on_line: Callable[[bytes], None] | None = None,
    log: BinaryIO | None = None,
    inherit: Sequence[int] = (),
) -> str:
    """Run ``command``; return why it failed, or "".

    Each line of its output and of its errors is written to ``log`` and handed to ``on_line``.
    Without ``on_line`` and ``log`` the command writes to this process's output. Commands beside
    this Python can be named, too. The command keeps the file descriptors in ``inherit``. With
    ``--cpu`` among its words it keeps freed memory, whatever its model: fairseq's own models would
    seem slower than this plugin's otherwise.

    If this function ends early, for any reason, all processes of the command end; on Linux also if
    this process is killed. Raises ``UserError`` for an unknown command.
    """
    newest = deque[bytes](maxlen=500)
    process = None
    try:
        # An exception that a handler raises in a fork is lost, and one before ``process`` has a
        # value would leave the command running.
        with _signals_wait():
            process = _start(command, inherit, bool(on_line or log))
        for line in process.stdout or ():
            newest.append(line)
            if log:
                with contextlib.suppress(OSError):  # a full disk does not end the command
                    log.write(line)
            if on_line:
                on_line(line)
        return explain(process.wait(), b"".join(newest).decode("utf-8", "replace"))
    except BaseException:
        if process:
            _end(process)
        raise


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Signals with a handler of Python's arrive when the block ends.

    Blocking them (``pthread_sigmask``) would not do: it holds for one thread, and any other thread
    of the process can take the signal, whose handler then runs in this one all the same.
    """
    arrived = []
    handlers = {number: signal.getsignal(number) for number in _STOPPING}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: arrived.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)


def _start(command: Sequence[str], inherit: Sequence[int], piped: bool) -> subprocess.Popen:
    """Start ``command`` as the leader of a process group that ends with this process.

    Raises ``UserError``.
    """
    parent = os.getpid()

    def set_up_child() -> None:
        os.setpgrp()  # so that a signal can reach all of the command's processes
        end_with_parent(signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before that took effect
            os.kill(os.getpid(), signal.SIGKILL)

    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if piped else {}
    memory = memory_variables() if "--cpu" in command else {}
    try:
        return subprocess.Popen(
            [*map(str, command)],
            env={**environment(), **memory},
            stdin=subprocess.DEVNULL,
            pass_fds=inherit,
            preexec_fn=set_up_child,
            **streams,
        )
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not installed beside this Python, nor on PATH") from None


def environment() -> dict[str, str]:
    """This process's environment for a command.

    Programs beside this Python are on its PATH, and its output is not buffered.
    """
    path = os.environ.get("PATH", "")
    beside = str(Path(sys.executable).parent)
    if beside not in path.split(os.pathsep):
        path = f"{beside}{os.pathsep}{path}"
    return {**os.environ, "PATH": path, "PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1"}


def _end(process: subprocess.Popen) -> None:
    """End every process of the group: SIGTERM, then SIGKILL after ``GRACE`` seconds.

    Signals to this process are ignored meanwhile.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOPPING}
    try:
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)  # raises when the last one has gone
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def explain(status: int, output: str) -> str:
    """Why a command ended with ``status``; "" for 0.

    The reason is its signal, the last error in its ``output``, or the last line.
    """
    if status == 0:
        return ""
    if status < 0:
        reason = f"killed by {signal.Signals(-status).name}"
        return f"{reason}, perhaps out of memory" if status == -signal.SIGKILL else reason

    # an error while the interpreter ends is not the reason
    text = re.sub(r"(?ms)^Exception ignored in.*?^[\w.]*(Error|Exception)\b.*?$", "", output)
    lines = [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]
    error = re.compile(r"(?:[\w-]+: )?(?:error: (.*)|([\w.]*(?:Error|Exception|Exit)\b(?::.*)?))$")
    reason = lines[-1] if lines else f"it exited with {status} and printed nothing"
    for line in lines:
        match = error.match(line)
        if match:
            reason = match[1] or match[2]
    if "Cannot load model parameters" in reason:  # fairseq leaves out which
        differs = re.search(r"^\s*((?:Missing key|Unexpected key|size mismatch).*)", text, re.M)
        if differs:
            reason += f" {differs[1][:200]}"
    return reason[:500]


def is_divergence(reason: str) -> bool:
    """Whether a training failed for this ``reason`` because its numbers left the finite range."""
    return bool(_NOT_FINITE.search(reason))


def git_commit() -> str | None:
    """The package's commit, with "+changes" if files differ; None where it is installed."""
    if not ((PLUGIN.parent / ".git").exists() and shutil.which("git")):
        return None
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    done = subprocess.run(
        command, cwd=PLUGIN.parent, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    return done.stdout.strip() or None
