#!/usr/bin/env python3
"""Train PreAct-ResNet on CIFAR-10, CIFAR-100, an image folder or handwritten digits, with any skip connection."""

import sys

from fairseq_rskip.vision.main import main

EXAMPLES = """\
The paper's rows (Liu et al. 2020; five seeds each: --seeds 1 2 3 4 5), with --depth 110 and CIFAR-10 by default:
  baseline, xSkip         --skip-kind xskip --skip-lambda 1|2|3 --skip-norm none
  xSkip+LN, +BN           --skip-kind xskip --skip-lambda 1|2|3 --skip-norm layer|batch
  rSkip+LN, +BN           --skip-kind rskip --skip-lambda 1|2|3 --skip-norm layer|batch
  0.5x+F, LN(0.5x+F)      --skip-kind xskip --skip-lambda 0.5 --skip-norm none|layer
  LN(x+2F), LN(x+3F)      --skip-kind xskip --skip-lambda 1 --skip-branch-scale 2|3 --skip-norm layer
  wSkip+LN, w from 1, 2   --skip-kind wskip --skip-init 1|2 --skip-norm layer
  CIFAR-100, Table 6      --data cifar100 --depth 20|32|44|56|110, baseline or rSkip+LN with lambda 2
Several GPUs: torchrun --nproc_per_node N scripts/train_cifar.py ... (see docs/cifar.md).
"""

if __name__ == "__main__":
    sys.exit(main(description=__doc__, epilog=EXAMPLES))
