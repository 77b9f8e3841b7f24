"""``python -m fairseq_rskip`` prints the folder for fairseq's ``--user-dir``; it needs neither torch nor fairseq."""

import argparse
import os
import sys

from fairseq_rskip import __version__


def main(argv=None) -> int:
    """Print the absolute path of the plugin folder, wherever it is installed."""
    parser = argparse.ArgumentParser(
        prog="python -m fairseq_rskip",
        description='Print the directory to hand to fairseq: fairseq-train --user-dir "$(python -m fairseq_rskip)" ...',
    )
    parser.add_argument("--version", action="version", version=f"fairseq_rskip {__version__}")
    parser.parse_args(argv)
    print(os.path.dirname(os.path.abspath(__file__)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
