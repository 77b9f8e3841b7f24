"""``python -m fairseq_rskip.tools.evaluate``: what scripts/evaluate.sh runs."""

import sys

from fairseq_rskip.tools.evaluate.arguments import main

if __name__ == "__main__":
    sys.exit(main())
