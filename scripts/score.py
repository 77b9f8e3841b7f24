#!/usr/bin/env python3
"""Score translations against references; -h lists the options. The work is in fairseq_rskip/tools/score.py."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def use_environment(missing: str) -> None:
    """Start again in the project's own environment, where no other is active; else end with one line."""
    python = ROOT / ".venv" / "bin" / "python"
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    if not active and python.exists() and Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        os.execv(python, [str(python), *sys.argv])
    sys.exit(f"error: {missing} is not installed; scripts/setup_env.sh makes an environment that has it")


if __name__ == "__main__":
    try:
        from fairseq_rskip.tools.score import main
    except ModuleNotFoundError as error:
        use_environment(error.name)
    sys.exit(main())
