#!/usr/bin/env python3
"""Training speed of PreAct-ResNet with each skip connection; -h says more."""

import sys

from fairseq_rskip.tools.bench_resnet import main

if __name__ == "__main__":
    sys.exit(main())
