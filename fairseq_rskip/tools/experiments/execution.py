"""Execute runs, each in a process of its own. In a run's folder run.json is its record, log.txt all its output."""

import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path

from fairseq_rskip import __version__
from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import locked, write_json
from fairseq_rskip.tools import process

from .plan import LOCK, LOG, RECORD, measured, read_record, state
from .records import Run
from .tasks import TASKS

LOOK_EVERY, SPEAK_EVERY, GRACE = 1.0, 60.0, 60.0  # seconds; GRACE is for a training to save
TIME = "%Y-%m-%dT%H:%M:%S%z"
SLURM = {"time": 1440, "gpus_per_node": 1, "cpus_per_task": 8, "array_parallelism": 64}


def note(folder: Path, **changes: object) -> None:
    """Change the record of a run whose lock the caller holds; None removes."""
    record = {name: value for name, value in {**read_record(folder), **changes}.items() if value is not None}
    write_json(folder / RECORD, record)


def prepare(run: Run) -> None:
    """Write what ``execute`` needs into the run's record, unless it is running."""
    settings = {name: value for name, value in asdict(run).items() if name not in ("task", "seed", "folder")}
    with locked(run.folder, LOCK) as lock:
        if lock is not None:
            note(run.folder, task=run.task, seed=run.seed, settings=settings)


def execute(folder: Path) -> bool:
    """Run the commands of a prepared run that have not ended yet; False if another process holds the run's lock."""
    record, start, error = read_record(folder), time.monotonic(), ""
    with locked(folder, LOCK) as lock:
        if lock is None or measured(record):
            return lock is not None
        run = Run(record["task"], seed=record["seed"], folder=folder, **record["settings"])
        commands = TASKS[run.task].commands(run)
        # what has ended is not run again: fairseq would train on where --patience has ended it
        complete = record.get("complete", 0) if record.get("commands") == commands else 0
        versions = {"fairseq_rskip": __version__, "python": platform.python_version()}
        note(folder, commands=commands, versions=versions, git=process.git_commit(), failed=None)
        for number, command in enumerate(commands[complete:], complete + 1):
            with open(folder / LOG, "ab", buffering=0) as log:
                log.write(f"== {time.strftime(TIME)} {shlex.join(command)}\n".encode())
                if error := process.follow(command, log=log, inherit=[lock.fileno()]):
                    break
            note(folder, complete=number)
        metrics = None if error else TASKS[run.task].measure(run)
        failed = {"error": error or "the commands succeeded but left no complete result", "time": time.strftime(TIME)}
        done = metrics and {**metrics, "seconds": round(time.monotonic() - start, 1), "time": time.strftime(TIME)}
        note(folder, metrics=done, failed=None if done else failed, complete=None)
    return True


def environments(jobs: int | None) -> list[dict[str, str]]:
    """Environment variables of each parallel run: a GPU or some cores; a single run gets all. Raises ``UserError``."""
    import torch

    count = torch.cuda.device_count()
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    jobs = jobs or max(1, count)
    if count and jobs > count:
        raise UserError(f"--jobs {jobs}: expected at most {count}, one for each GPU that torch sees")
    # threads that spin while they wait would take the cores from the other runs
    share = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // jobs)), "OMP_WAIT_POLICY": "passive"}
    return [{}] if jobs == 1 else [{"CUDA_VISIBLE_DEVICES": gpus[n]} if count else share for n in range(jobs)]


def run_all(runs: list[Run], places: list[dict[str, str]]) -> list[str]:
    """The states of ``runs`` after all are executed, as many at a time as there are ``places``. Ctrl-C ends all."""
    waiting, running, spoken = deque(runs), {}, time.monotonic()  # by the folder: run, process, place, begin
    try:
        while waiting or running:
            for run, child, place, _ in list(running.values()):
                if child.poll() is not None:
                    del running[run.folder]
                    places.append(place)
                    print_line(f"{run}: {state(run)}")
            while waiting and places:
                run, place = waiting.popleft(), places.pop(0)
                prepare(run)
                print_line(f"{run}: starts; {len(waiting)} more to start")
                command, env = [sys.executable, "-m", __name__, str(run.folder)], {**os.environ, **place}
                child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
                running[run.folder] = (run, child, place, (time.monotonic(), TASKS[run.task].progress(run)[0]))
            time.sleep(LOOK_EVERY if running else 0)
            if time.monotonic() - spoken > SPEAK_EVERY:
                spoken = time.monotonic()
                for run, _, _, (start, before) in running.values():
                    part, losses = TASKS[run.task].progress(run)
                    minutes = (spoken - start) / 60
                    left = f", {minutes * (1 - part) / (part - before):.0f} minutes left" if part > before else ""
                    print_line(f"{run}: {part:.0%}, {minutes:.0f} minutes{left}; {losses}")
    finally:
        children = [child for _, child, _, _ in running.values()]
        for child in children:
            child.terminate()
        for child in children:
            child.wait()
    return [state(run) for run in runs]


def submit(runs: list[Run], words: list[str], out: Path) -> None:
    """Submit ``runs`` to SLURM as one array, with sbatch's options KEY=VALUE, and return. Raises ``UserError``."""
    from submitit import SlurmExecutor

    pairs = [word.lstrip("-").partition("=") for word in words]
    if not all(key and value for key, _, value in pairs):
        raise UserError(f"--slurm {' '.join(words)}: expected KEY=VALUE, options of sbatch, as partition=gpu")
    options = {**SLURM, **{key.replace("-", "_"): int(v) if v.isdigit() else v for key, _, v in pairs}}
    more = {key: options.pop(key) for key in list(options) if key not in SlurmExecutor._valid_parameters()}
    for run in runs:
        prepare(run)
    executor = SlurmExecutor(out / "slurm")
    executor.update_parameters(job_name="rskip", additional_parameters=more, **options)
    try:
        jobs = executor.map_array(main, [[str(run.folder)] for run in runs])
    except (OSError, RuntimeError) as error:
        raise UserError(f"SLURM did not take the jobs: {str(error).strip().splitlines()[-1]}") from None
    for run, job in zip(runs, jobs):
        print_line(f"{run}: SLURM job {job.job_id}")


def main(argv: list[str]) -> int:
    """Execute the run of one folder. When the parent process ends, the run saves its state and ends."""
    process.end_with_parent(signal.SIGTERM)
    process.GRACE = GRACE
    process.stop_on_signals()
    try:  # a command that looks at the state holds the lock for a moment
        return exit_status(lambda: not any(execute(Path(argv[0])) or time.sleep(0.2) for _ in range(5)))
    except process.Stopped as stopped:
        return stopped.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
