#!/usr/bin/env python3
"""The paper's tables and figures, one command each; -h says how, docs/reproduce.md says more."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from reproduction.main import main  # noqa: E402
from reproduction.options import parse  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(parse()))
