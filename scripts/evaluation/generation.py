"""fairseq-generate in a process of its own, and its output back in the order of the sentences."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Tuple

from tqdm import tqdm
from training.lengths import POSITIONS

import fairseq_rskip
from evaluation.prepared import POST_PROCESS, Prepared
from evaluation.text import InputError

UNREADABLE = r":|\$\{|\\'|\\$"  # in a path, to fairseq: separates paths; asks for another setting; ends a quotation
HALF_PRECISION_SINCE = (7, 0)  # compute capability of the first GPUs on which fp16 is fast (Volta)


def device_options(cpu: bool, fp32: bool) -> List[str]:
    """fairseq's options for the device that is there: ``--cpu``, ``--fp16``, or none."""
    import torch

    if cpu or not torch.cuda.is_available():
        return ["--cpu"]
    return ["--fp16"] if not fp32 and torch.cuda.get_device_capability() >= HALF_PRECISION_SINCE else []


def search_options(prepared: Prepared, subset: str, beam: int, lenpen: float, max_tokens: int) -> List[str]:
    """fairseq's options that decide which hypotheses come out.

    The longest output is the input's length + 50, as in Vaswani et al. 2017, section 6.1.
    """
    post_process = POST_PROCESS[prepared.bpe]
    return [
        *("--source-lang", prepared.src, "--target-lang", prepared.tgt, "--gen-subset", subset),
        *("--beam", str(beam), "--lenpen", str(lenpen), "--max-len-a", "1", "--max-len-b", "50"),
        *("--max-tokens", str(max_tokens), *(["--post-process", post_process] if post_process else [])),
    ]


def position_options(limits: Tuple[int, int]) -> List[str]:
    """What lets fairseq-generate take sentences as long as the model does; its own limit is ``POSITIONS``."""
    names = ("--max-source-positions", "--max-target-positions")
    return [word for name, limit in zip(names, limits) if limit > POSITIONS for word in (name, str(limit))]


def command(prepared: Prepared, checkpoint: Path, options: List[str]) -> List[str]:
    """The whole command line; the plugin is always named. Raises ``InputError`` for a path that fairseq misreads."""
    for path in (prepared.folder, checkpoint):
        bad = sorted(set(re.findall(UNREADABLE, str(path))))
        if bad:
            raise InputError(f"fairseq cannot take {' or '.join(bad)} in a path: rename {path}, or link to it")
    data, path = (f"./{path}" if str(path).startswith("-") else str(path) for path in (prepared.folder, checkpoint))
    plugin = str(Path(fairseq_rskip.__file__).resolve().parent)
    return ["fairseq-generate", data, "--user-dir", plugin, "--path", path, *options, "--num-workers", "0"]


def run(arguments: List[str], log: Path, sentences: int, failed_log: Path) -> None:
    """Run ``arguments`` with standard output in ``log``, standard error after it, and a progress bar on a terminal.

    Raises ``InputError`` with the last meaningful line if the command fails; its log is then ``failed_log``.
    """
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    errors = log.with_name(log.name + ".stderr")
    if failed_log.exists():
        failed_log.unlink()
    try:
        with open(log, "wb") as out, open(errors, "wb") as err, tqdm(total=sentences, unit="sent", disable=None) as bar:
            with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=err) as process:
                try:
                    for line in process.stdout:
                        out.write(line)
                        bar.update(line.startswith(b"H-"))
                except BaseException:  # a full disk, an interruption
                    process.terminate()
                    raise
            out.write(errors.read_bytes())
        if process.returncode != 0:
            os.replace(log, failed_log)
            raise InputError(f"{explain(failed_log, process.returncode)} (the log is {failed_log})")
    except FileNotFoundError:
        raise InputError("fairseq-generate is not installed beside this Python, nor on PATH") from None
    finally:
        if errors.exists():
            errors.unlink()


def explain(log: Path, status: int) -> str:
    """One line on why fairseq-generate ended with ``status``: its log's last error, else its last line."""
    if status < 0:
        return f"fairseq-generate was killed by signal {-status}" + (", out of memory perhaps" if status == -9 else "")
    text = log.read_text(encoding="utf-8", errors="replace")
    text = re.sub(r"^Exception ignored in.*?^[\w.]*(Error|Exception)\b.*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    named = [line for line in lines if re.match(r"error: |[\w.]*(Error|Exception|Exit)\b:", line)]
    last = (named or lines or ["it said nothing"])[-1]
    return f"fairseq-generate failed with exit status {status}: {last}"


def hypotheses(log: Path, sentences: int) -> List[str]:
    """The best hypotheses in ``log``, subwords joined, in the corpus' order.

    Raises ``InputError`` unless there is exactly one for each of ``sentences``.
    """
    found: Dict[int, str] = {}
    total = 0
    for line in log.read_text(encoding="utf-8").split("\n"):
        match = re.match(r"H-(\d+)\t[^\t]*\t(.*)", line)
        if match:
            found[int(match.group(1))] = match.group(2)
            total += 1
    if total != sentences or set(found) != set(range(sentences)):
        raise InputError(
            f"generation gave {total} hypotheses for {len(found)} sentences and there are {sentences} references"
            f" (the log is {log})"
        )
    return [found[i] for i in range(sentences)]


def quoted(arguments: List[str]) -> str:
    """The command as it can be pasted into a shell."""
    return shlex.join(arguments)
