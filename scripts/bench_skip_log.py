#!/usr/bin/env python3
"""What --skip-log-interval costs; -h says more."""

import sys

from fairseq_rskip.tools.bench_skip_log import main

if __name__ == "__main__":
    sys.exit(main())
