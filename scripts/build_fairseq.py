#!/usr/bin/env python3
"""Build a wheel of fairseq 0.12.2 for today's Python, torch and numpy; print its path (--help says more)."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    # fairseq_rskip need not be installed yet
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
    os.execv(sys.executable, [sys.executable, "-m", "fairseq_rskip.tools.build_fairseq", *sys.argv[1:]])
