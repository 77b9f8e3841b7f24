"""Runs on this machine, some at a time, each on its own GPU where there are GPUs.

submitit's ``LocalExecutor`` (1.5.4) starts every job when it is submitted, so a queue and the choice of GPUs would stay
here, and kills a job one second after its SIGINT, where a training needs up to a minute to save: a pool of threads.
"""

import io
import os
import queue
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from tqdm import tqdm

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError

from . import execution, runs
from .plans import TASKS, Run
from .runs import State

LOOK_EVERY, SPEAK_EVERY = 1.0, 60.0  # seconds
BAR = "{percentage:3.0f} % [{elapsed}<{remaining}{postfix}] {desc}"  # elapsed and left


def visible_gpus() -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES of the GPUs that torch sees."""
    import torch

    chosen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    count = torch.cuda.device_count()
    return chosen[:count] if chosen else [str(number) for number in range(count)]


def environments(jobs: int | None) -> list[dict[str, str]]:
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


def run_all(waiting: list[Run], places: list[dict[str, str]]) -> list[State]:
    """Execute ``waiting`` runs, as many at a time as there are ``places``; returns what became of each.

    A failed one does not stop the others. KeyboardInterrupt ends them all, saved, and goes on to the caller.
    """
    free: queue.Queue[dict[str, str]] = queue.Queue()
    for place in places:
        free.put(place)
    with ThreadPoolExecutor(len(places)) as pool:
        futures: dict[Future[State], Run] = {}
        try:
            futures.update((pool.submit(_one, run, free), run) for run in waiting)
            _watch(futures)
        except BaseException:
            for future in futures:
                future.cancel()
            execution.stop()
            raise
    return [future.result() for future in futures]


def _one(run: Run, free: "queue.Queue[dict[str, str]]") -> State:
    place = free.get()
    try:
        print_line(f"start {run}", bar=tqdm)
        state = execution.execute(run.folder, place)
    except (UserError, OSError) as error:  # a full disk, a damaged folder: others may do better
        state = State(runs.BROKEN, detail=str(error))
    finally:
        free.put(place)
    print_line(f"{state.name} {run}" + (f": {state.detail}" if state.detail else ""), bar=tqdm)
    return state


def _watch(futures: dict["Future[State]", Run]) -> None:
    """Wait for all of them, and show how far they are, with losses and time left: on a terminal a live line for each,
    elsewhere a line once a minute."""
    pending, last, live = set(futures), time.monotonic(), sys.stdout.isatty()
    bars: dict[Path, tqdm] = {}
    try:
        while pending:
            pending = wait(pending, timeout=LOOK_EVERY, return_when=FIRST_COMPLETED).not_done
            running = [future for future in pending if future.running()]
            _show(bars, {futures[future].folder: futures[future] for future in running}, live)
            if not live and time.monotonic() - last > SPEAK_EVERY:
                last = time.monotonic()
                for bar in bars.values():
                    print_line(f"{runs.RUNNING} {bar}")
    finally:
        _show(bars, {}, live)


def _show(bars: dict[Path, tqdm], running: dict[Path, Run], live: bool) -> None:
    """Have a bar, by the folder, for each of the ``running`` alone, and move it to where the run is."""
    for folder in set(bars) - set(running):
        bars.pop(folder).close()
    output = sys.stdout if live else io.StringIO()
    for folder, run in running.items():
        if folder not in bars:
            bars[folder] = tqdm(total=1.0, desc=str(run), bar_format=BAR, file=output, dynamic_ncols=True, leave=False)
        bar, (part, losses) = bars[folder], TASKS[run.task].progress(run.settings, folder)
        if not bar.n:  # time left is reckoned from here: the start took long, and a resumed run did less
            bar.reset()
            bar.initial = part
        bar.n = part
        bar.set_postfix_str(losses, refresh=False)
        bar.refresh()
