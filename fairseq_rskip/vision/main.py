"""The command of ``scripts/train_cifar.py``. Torch is imported after ``-h`` is answered."""

import os
import sys
from collections.abc import Sequence

from ..console import print_line
from ..errors import UserError, exit_status
from .options import WARM_UP, WHOLE, make_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Train as ``argv`` says; return the exit status.

    What the user can fix is one line on stderr.
    """
    if argv is None:
        argv = sys.argv[1:]
    if "-h" in argv or "--help" in argv:  # before torch is imported, which takes seconds
        parser, _ = make_parser()
        parser.print_help()
        return 0
    return exit_status(lambda: _train(argv))


def _train(argv: Sequence[str]) -> None:
    if os.environ.get("RANK", "0") == "0":
        print_line("loading PyTorch")
    import torch.distributed as dist

    from .config import parse
    from .seeds import train_all
    from .trainer import join

    config = parse(argv)
    group = join(config.device)
    if group.first and config.warmup_iterations != WARM_UP:
        print_line(
            f"warm-up: {config.warmup_iterations} updates; the paper's: {WARM_UP} of {WHOLE}"
        )
    try:
        train_all(config, group)
    except Exception as error:
        line = str(error) if isinstance(error, UserError) else _explain(error, config.compile)
        if not line:
            raise
        if not group.first:  # the first process may have no error, or another one
            line = f"process {group.rank}: {line}"
        raise UserError(line) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _explain(error: Exception, compiles: bool) -> str:
    """Return a line for errors of torch and wandb that the user can act on, else "".

    ``compiles`` says that the training has --compile.
    """
    name = type(error).__name__
    if name in ("OutOfMemoryError", "MemoryError") or "allocate memory" in str(error):
        return "the memory is full: try a smaller --batch-size, on a GPU also --amp bf16"

    module = type(error).__module__
    reason = " ".join(str(error).split())[:200]
    if compiles and module.startswith("torch._"):
        return f"--compile failed, train without it: {reason}"
    if module.startswith("wandb"):
        return f"--wandb-project failed, train without it: {reason}"
    return ""
