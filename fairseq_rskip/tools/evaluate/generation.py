"""fairseq-generate in a process of its own, and its output back in the order of the sentences."""

import os
import re
import shutil
import tempfile
from pathlib import Path

from fairseq_rskip.console import Progress
from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.evaluate.prepared import POST_PROCESS, Prepared
from fairseq_rskip.tools.process import explain, follow
from fairseq_rskip.tools.train.data import POSITIONS
from fairseq_rskip.tools.train.options import PLUGIN

# in a path fairseq reads : as a separator, ${ as interpolation, \' and a last \ as part of the quotation around it
UNREADABLE = r":|\$\{|\\'|\\$"
# tensor2tensor divides a log-probability by ((5 + L) / 6)^0.6 (Wu et al. 2016, equation 14), fairseq by L^lenpen. What
# chooses between hypotheses of about L tokens is the elasticity: lenpen, and 0.6 L / (L + 5), or 0.5 at 25 subwords.
DEFAULT_LENPEN = 0.5
HALF_PRECISION_SINCE = (7, 0)  # compute capability of the first GPUs on which fp16 is fast (Volta)


def device_options(cpu: bool, fp32: bool) -> list[str]:
    """fairseq's options for the device that is there: ``--cpu``, ``--fp16``, or none."""
    import torch

    if cpu or not torch.cuda.is_available():
        return ["--cpu"]
    return ["--fp16"] if not fp32 and torch.cuda.get_device_capability() >= HALF_PRECISION_SINCE else []


def search_options(prepared: Prepared, subset: str, beam: int, lenpen: float, max_tokens: int) -> list[str]:
    """fairseq's options that decide which hypotheses come out.

    The longest output is the input's length + 50, as in Vaswani et al. 2017, section 6.1.
    """
    post_process = POST_PROCESS[prepared.bpe]
    return [
        *("--source-lang", prepared.src, "--target-lang", prepared.tgt, "--gen-subset", subset),
        *("--beam", str(beam), "--lenpen", str(lenpen), "--max-len-a", "1", "--max-len-b", "50"),
        *("--max-tokens", str(max_tokens), *(["--post-process", post_process] if post_process else [])),
    ]


def position_options(limits: tuple[int, int]) -> list[str]:
    """What lets fairseq-generate take sentences as long as the model does; its own limit is ``POSITIONS``."""
    names = ("--max-source-positions", "--max-target-positions")
    return [word for name, limit in zip(names, limits) if limit > POSITIONS for word in (name, str(limit))]


def command(prepared: Prepared, checkpoint: Path, options: list[str]) -> list[str]:
    """The whole command line; the plugin is always named. Raises ``UserError`` for a path that fairseq misreads."""
    for path in (prepared.folder, checkpoint):
        bad = sorted(set(re.findall(UNREADABLE, str(path))))
        if bad:
            raise UserError(f"fairseq cannot take {' or '.join(bad)} in a path: rename {path}, or link to it")
    data, path = (f"./{path}" if str(path).startswith("-") else str(path) for path in (prepared.folder, checkpoint))
    return ["fairseq-generate", data, "--user-dir", str(PLUGIN), "--path", path, *options, "--num-workers", "0"]


def run(arguments: list[str], log: Path, sentences: int, failed_log: Path) -> None:
    """Run ``arguments`` with standard output in ``log``, standard error after it, and say how far it is.

    Raises ``UserError`` with the last meaningful line if the command fails; its log is then ``failed_log``.
    """
    failed_log.unlink(missing_ok=True)
    with open(log, "wb") as out, tempfile.TemporaryFile() as errors, Progress(sentences, "translated", "sent") as bar:

        def take(line: bytes) -> None:
            out.write(line)
            if line.startswith(b"H-"):
                bar.advance()

        status = follow(arguments, take, errors=errors)
        errors.seek(0)
        shutil.copyfileobj(errors, out)
    if status != 0:
        os.replace(log, failed_log)
        text = failed_log.read_text(encoding="utf-8", errors="replace")
        raise UserError(f"{explain('fairseq-generate', text, status)} (the log is {failed_log})")


def hypotheses(log: Path, sentences: int) -> list[str]:
    """The best hypotheses in ``log``, subwords joined, in the corpus' order.

    Raises ``UserError`` unless there is exactly one for each of ``sentences``.
    """
    found: dict[int, str] = {}
    total = 0
    for line in log.read_text(encoding="utf-8").split("\n"):
        match = re.match(r"H-(\d+)\t[^\t]*\t(.*)", line)
        if match:
            found[int(match.group(1))] = match.group(2)
            total += 1
    if total != sentences or set(found) != set(range(sentences)):
        raise UserError(
            f"generation gave {total} hypotheses for {len(found)} sentences and there are {sentences} references"
            f" (the log is {log})"
        )
    return [found[i] for i in range(sentences)]
