#!/usr/bin/env python3
"""Why a skip connection helps: figures and tables from checkpoints, logs and fresh stacks (docs/analysis.md)."""

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import List, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from fairseq_rskip.errors import UserError  # noqa: E402
from fairseq_rskip.tools.console import Parser  # noqa: E402

# What -h lists; the modules of analysing/ say the rest, and are imported only when asked for: each has its own needs.
COMMANDS = {
    "gradients": "Figure 3: the gradient norm at every residual block",
    "ratio": "x:F in every block, learned gains, effective scale",
    "depth": "gradients, branches and tokens against depth",
    "curves": "Figure 4: training loss and validation metric of runs",
}


def parse(argv: List[str]) -> argparse.Namespace:
    """The options, with ``run`` of the subcommand's module. Raises ``ImportError`` if that needs what is missing."""
    parser = Parser(prog="analyze.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND [options]", required=True)
    for name, line in COMMANDS.items():
        command = commands.add_parser(name, help=line)
        if argv[:1] == [name]:
            module = importlib.import_module(f"analysing.{name}")
            command.description = module.__doc__
            command.set_defaults(run=module.run)
            module.add_arguments(command)
    return parser.parse_args(argv)


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command line ``argv``; returns the exit status."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        options.run(options)
        sys.stdout.flush()
    except UserError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        return _fail(f"this needs the Python package {error.name}, which is not installed")
    except BrokenPipeError:  # `analyze.py depth | head`: what is still in the buffer would fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return 0


def _fail(message: str, status: int = 1) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
