"""``python -m fairseq_rskip.ops`` builds the CPU operator ahead of its first use, and says what is in use and why."""

import sys

from ..errors import exit_status
from ..tools.console import Parser
from .dispatch import in_use


def main() -> int:
    """Print what is in use; the status is 0 whatever is in use."""
    Parser(prog="python -m fairseq_rskip.ops", description=__doc__).parse_args()
    backend = in_use("cpu")
    print(f"cpu: {backend.name} ({backend.reason})")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
