#!/usr/bin/env python3
"""Build a wheel of fairseq 0.12.2 for today's Python, torch and numpy; print its path (--help says more)."""

import sys
from pathlib import Path

if __name__ == "__main__":
    if sys.version_info < (3, 9):
        sys.exit("error: Python 3.9 or newer is needed; on Python 3.8 install fairseq 0.12.2 from the package index")
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from fairseq_port.main import main

    sys.exit(main())
