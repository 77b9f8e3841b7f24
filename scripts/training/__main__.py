"""What train.sh runs. The package's parent takes the place of its own folder on Python's path."""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent
sys.path[0:1] = [str(SCRIPTS), str(SCRIPTS.parent)]

from training.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
