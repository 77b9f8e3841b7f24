#!/usr/bin/env python3
"""Why a skip connection helps: figures and tables from checkpoints, logs and fresh stacks (docs/analysis.md)."""

import sys

from fairseq_rskip.tools.analyze import main

if __name__ == "__main__":
    sys.exit(main())
