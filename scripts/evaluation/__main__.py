"""What evaluate.sh runs. The package's parent takes the place of its own folder on Python's path."""

import signal
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent
sys.path[0:1] = [str(SCRIPTS), str(SCRIPTS.parent)]

from evaluation.arguments import parse  # noqa: E402

if __name__ == "__main__":
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what is half done is cleared away
    from evaluation.main import main  # takes seconds: after the options have been checked

    sys.exit(main(options))
