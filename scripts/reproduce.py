#!/usr/bin/env python3
"""The paper's tables and figures, one command each; -h says how, docs/reproduce.md says more."""

import sys

from fairseq_rskip.machine import share_cores
from fairseq_rskip.tools.reproduce import main

if __name__ == "__main__":
    share_cores()
    sys.exit(main())
