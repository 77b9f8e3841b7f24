"""``python -m fairseq_rskip.tools.train``: what scripts/train.sh runs."""

import sys

from fairseq_rskip.tools.train.main import main

if __name__ == "__main__":
    sys.exit(main())
