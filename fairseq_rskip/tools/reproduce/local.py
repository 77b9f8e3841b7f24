"""Runs on this machine, some at a time, each on a GPU of its own where there are GPUs."""

import os
import queue
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Callable, Dict, List, Optional

import torch

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.reproduce import execution, runs
from fairseq_rskip.tools.reproduce.plans import Job
from fairseq_rskip.tools.reproduce.runs import State

SPEAK_EVERY = 60.0  # seconds


def visible_gpus() -> List[str]:
    """Names for CUDA_VISIBLE_DEVICES of the GPUs that torch sees."""
    chosen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    count = torch.cuda.device_count()
    return chosen[:count] if chosen else [str(number) for number in range(count)]


def environments(jobs: Optional[int]) -> List[Dict[str, str]]:
    """What each of the runs at a time gets: a GPU, or its share of the cores. Raises ``UserError``.

    ``jobs`` is how many at a time, by default one a GPU. A single run at a time has all GPUs.
    """
    gpus = visible_gpus()
    count = jobs or max(1, len(gpus))
    if gpus and count > len(gpus):
        raise UserError(f"--jobs {count}: expected at most {len(gpus)}, one for each GPU that torch sees")
    if count == 1:
        return [{}]
    if gpus:
        return [{"CUDA_VISIBLE_DEVICES": name} for name in gpus[:count]]
    threads = str(max(1, len(os.sched_getaffinity(0)) // count))
    # threads that spin while they wait would take the cores from the other runs
    return [{"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}] * count


def run_all(jobs: List[Job], places: List[Dict[str, str]], say: Callable[[str], None]) -> List[State]:
    """Execute ``jobs``, as many at a time as there are ``places``, and say how it goes; returns what became of each.

    A failed one does not stop the others. KeyboardInterrupt ends them all, saved, and goes on to the caller.
    """
    free: queue.Queue[Dict[str, str]] = queue.Queue()
    for place in places:
        free.put(place)
    with ThreadPoolExecutor(len(places)) as pool:
        futures: Dict[Future[State], Job] = {}
        try:
            for job in jobs:
                futures[pool.submit(_one, job, free, say)] = job
            _watch(futures, say)
        except BaseException:
            for future in futures:
                future.cancel()
            execution.stop()
            raise
    return [future.result() for future in futures]


def _one(job: Job, free: "queue.Queue[Dict[str, str]]", say: Callable[[str], None]) -> State:
    place = free.get()
    try:
        say(f"start {name(job)}")
        state = execution.execute(job.folder, place)
    except (UserError, OSError) as error:  # a full disk, a damaged folder: others may do better
        state = State(runs.BROKEN, detail=str(error))
    finally:
        free.put(place)
    say(f"{state.name} {name(job)}" + (f": {state.detail}" if state.detail else ""))
    return state


def _watch(futures: Dict["Future[State]", Job], say: Callable[[str], None]) -> None:
    pending, last = set(futures), time.monotonic()
    while pending:
        done, pending = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
        if time.monotonic() - last > SPEAK_EVERY:
            last = time.monotonic()
            for future in pending:
                if future.running():
                    say(f"{runs.state(futures[future])} {name(futures[future])}")


def name(job: Job) -> str:
    return f"{job.folder.parent.name}/{job.folder.name}"
