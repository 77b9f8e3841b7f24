"""Which SLURM jobs are alive, as squeue says."""

import functools
import os
import subprocess
from typing import FrozenSet, NamedTuple, Optional

PATIENCE = 60.0  # seconds


class Answer(NamedTuple):
    """The user's ``jobs`` that wait or run, elements of arrays as 12_0; or the ``problem`` why they are not known."""

    jobs: FrozenSet[str] = frozenset()
    problem: str = ""


@functools.lru_cache(maxsize=1)
def ask() -> Answer:
    """Ask SLURM, once: ``ask.cache_clear()`` makes it ask again."""
    command = ["squeue", f"--user={os.getuid()}", "--array", "--noheader", "--format=%i"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    except FileNotFoundError:
        return Answer(problem="there is no squeue in PATH")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answer(problem=f"squeue does not answer: {error}")
    if done.returncode:
        return Answer(problem=" ".join(done.stderr.split()) or f"squeue ended with status {done.returncode}")
    return Answer(frozenset(done.stdout.split()))


def alive(job: Optional[str]) -> bool:
    """Whether ``job`` waits or runs; True where SLURM cannot be asked."""
    answer = ask()
    return job is not None and (bool(answer.problem) or job in answer.jobs)
