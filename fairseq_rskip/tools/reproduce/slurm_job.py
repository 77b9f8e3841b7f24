"""What a SLURM job does: one run, which saves in time when SLURM wants the machine back, and is queued again.

submitit pickles an ``Attempt`` by its name; the job imports it from the installed package. What happens on the signals
(docs/reproduce.md):

* USR2, some time before the time limit: submitit's handler calls ``checkpoint``, then requeues the job.
* TERM, of a pre-emption or scancel: the run saves; then the job waits for SLURM to kill it, and to queue it again if
  it was pre-empted. Ending by itself would make it a finished job, which SLURM does not queue again.

The run has a thread of its own, for a handler that interrupts ``Popen.wait`` would find its lock taken.
"""

import contextlib
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Optional

from . import execution, runs
from .runs import BROKEN, DONE, STOPPED, State

IS_KILLED = 600.0  # seconds in which SLURM kills a job that it has told to end


class Attempt:
    """Does the run of ``folder``."""

    def __init__(self, folder: str):
        self.folder = folder
        self.state: Optional[State] = None

    def __call__(self) -> None:
        """Raises ``RuntimeError`` if the run failed: that makes it a failed job."""
        signal.signal(signal.SIGTERM, lambda *_: execution.stop())  # submitit's own handler ignores it
        threading.Thread(target=self._execute).start()
        try:
            self._wait()
            if self.state.name == STOPPED:
                self._note(self._job())
                time.sleep(IS_KILLED)
            if self.state.name in (BROKEN, STOPPED):
                raise RuntimeError(f"{self.state}; {self.folder}/{runs.LOG} says more")
        except SystemExit:  # queued again
            raise
        except BaseException:
            execution.stop()
            self._wait()
            self._note(None)
            raise

    def checkpoint(self) -> Any:
        """submitit's question, inside the handler of USR2, what to do when the job runs again; None for nothing."""
        from submitit.helpers import DelayedSubmission

        execution.stop()
        self._wait()
        if self.state.name == DONE:  # it was just done
            sys.exit(0)
        if self.state.name == BROKEN:
            return None
        self._note(self._job())
        return DelayedSubmission(type(self)(self.folder))

    def _execute(self) -> None:
        try:
            self.state = execution.execute(Path(self.folder))
        except BaseException as error:
            self.state = State(BROKEN, detail=str(error))
            raise

    def _wait(self) -> None:
        while self.state is None:
            time.sleep(0.1)

    def _job(self) -> dict:
        from submitit import JobEnvironment

        return {"job": JobEnvironment().job_id}

    def _note(self, queued: Optional[dict]) -> None:
        """Record that this job will resume the run, or (None) will not."""
        with runs.holding(Path(self.folder)) as lock, contextlib.suppress(OSError):
            if lock is not None:
                runs.note(Path(self.folder), queued=queued)
