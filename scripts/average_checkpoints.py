#!/usr/bin/env python3
"""Average the weights of several fairseq checkpoints; -h lists the options."""

import sys

from fairseq_rskip.tools.average import main

if __name__ == "__main__":
    sys.exit(main())
