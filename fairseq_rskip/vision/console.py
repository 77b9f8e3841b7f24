"""Printing that outlives its reader: `train_cifar.py | head` must not cost the training."""

import os
import sys
from typing import Any, Optional


def tell(line: str, stream: str = "stdout", bar: Optional[Any] = None) -> None:
    """Print ``line`` to ``stdout`` or ``stderr``, above tqdm's ``bar`` if there is one; nothing where nobody reads."""
    file = getattr(sys, stream)
    try:
        if bar is None:
            print(line, file=file, flush=True)
        else:
            bar.write(line, file=file)
            file.flush()
    except BrokenPipeError:  # what is still in the buffer would fail again at exit
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file.fileno())
        os.close(nowhere)
