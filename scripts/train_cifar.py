#!/usr/bin/env python3
"""Train PreAct-ResNet with any skip connection on CIFAR, an image folder or handwritten digits."""

import sys

from fairseq_rskip.machine import share_cores
from fairseq_rskip.vision.main import main

if __name__ == "__main__":
    share_cores()
    sys.exit(main())
