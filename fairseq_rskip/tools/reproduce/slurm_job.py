"""What a SLURM job does: one run, told in time to save when SLURM wants the machine back, and queued again.

submitit writes an ``Attempt`` into a file, class and all, and its process in the job reads it there. This module must
therefore import nothing of the project: not even its folder need be known to that process, and torch is not loaded
twice. What happens on the signals (docs/reproduce.md):

* USR2, some time before the time limit: submitit's handler calls ``checkpoint``, then requeues the job.
* TERM, of a pre-emption or scancel: the run saves; then the job waits for SLURM to kill it, and to queue it again if
  it was pre-empted. Ending by itself would make it a finished job, which SLURM does not queue again.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, List, Optional

BROKEN = 1  # the exit status of `reproduce.py execute` for a run that failed, and whose log says why
SAVES = 80.0  # seconds that a run has to save; `execute` itself kills its commands after 60
IS_KILLED = 600.0  # seconds in which SLURM kills a job that it has told to end


class Attempt:
    """Runs ``command``, which does the run of ``folder``, in the folder ``where``."""

    def __init__(self, command: List[str], folder: str, where: str):
        self.command, self.folder, self.where = command, folder, where
        self.process: Optional[int] = None
        self.status: Optional[int] = None
        self.told = False  # to save and end

    def __call__(self) -> None:
        """Raises ``RuntimeError`` if the run failed: that makes it a failed job."""
        signal.signal(signal.SIGTERM, self.save)  # submitit's own handler ignores it
        child = subprocess.Popen(
            self.command, cwd=self.where, stdin=subprocess.DEVNULL, preexec_fn=_ignore_user_signals
        )
        self.process = child.pid
        try:
            self._wait()
            if self.told and self.status not in (0, BROKEN):
                self._queued(True)
                time.sleep(IS_KILLED)
            child.wait()
            if self.status:
                raise RuntimeError(f"status {self.status}: {self.folder}/log.txt says why")
        except SystemExit:  # queued again
            raise
        except BaseException:
            self._stop()
            self._queued(False)
            raise

    def checkpoint(self) -> Any:
        """submitit's question, inside the handler of USR2, what to do when the job runs again; None for nothing."""
        from submitit.helpers import DelayedSubmission

        self._stop()
        if self.status == 0:  # it was just done
            sys.exit(0)
        if self.status == BROKEN:
            return None
        self._queued(True)
        return DelayedSubmission(type(self)(self.command, self.folder, self.where))

    def save(self, *_: Any) -> None:
        """Tell the run to save and end, once: a second signal would end it unsaved."""
        if self.process and not self.told and not self._ended():
            os.kill(self.process, signal.SIGTERM)
        self.told = True

    def _stop(self) -> None:
        self.save()
        deadline = time.monotonic() + SAVES
        while self.process and not self._ended():
            if time.monotonic() > deadline:
                os.kill(self.process, signal.SIGKILL)
            time.sleep(0.1)

    def _wait(self) -> None:
        while not self._ended():
            time.sleep(0.2)

    def _ended(self) -> bool:
        """Whether the process has ended; sets ``status``.

        Not by ``Popen.wait``: its lock, held when a signal comes, would keep the signal's handler from ever knowing.
        """
        if self.status is None:
            about = os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if about is not None:
                self.status = about.si_status if about.si_code == os.CLD_EXITED else -about.si_status
        return self.status is not None

    def _queued(self, yes: bool) -> None:
        """Say in the run's folder that this job will go on with it, or will not."""
        from submitit import JobEnvironment

        path = Path(self.folder) / "queued.json"
        if yes:
            part = path.with_name(f".queued.{os.getpid()}.part")
            part.write_text(json.dumps({"job": JobEnvironment().job_id}) + "\n", "utf-8")
            part.replace(path)
        elif path.exists():
            path.unlink()


def _ignore_user_signals() -> None:
    """Some clusters signal every process of a job, and USR2 ends those that have no handler."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
