#!/usr/bin/env python3
"""Cost of the skip connection in a Transformer, beside stock fairseq's; -h says more."""

import sys

from fairseq_rskip.tools.bench_transformer import main

if __name__ == "__main__":
    sys.exit(main())
