#!/usr/bin/env python3
"""Train PreAct-ResNet on CIFAR-10, CIFAR-100, an image folder or handwritten digits, with any skip connection."""

import sys

from fairseq_rskip.vision.main import main

if __name__ == "__main__":
    sys.exit(main())
