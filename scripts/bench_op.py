#!/usr/bin/env python3
"""Speed of the recursive skip's operator, beside torch's; -h says more."""

import sys

from fairseq_rskip.tools.bench_operator import main

if __name__ == "__main__":
    sys.exit(main())
