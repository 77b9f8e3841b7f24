"""Why a skip connection helps: figures and tables from checkpoints, logs and fresh stacks (docs/analysis.md)."""

import argparse
import importlib
import sys
from typing import Any

from ..analysis import figures
from ..console import Parser
from ..errors import exit_status

# What -h lists; the modules of fairseq_rskip.analysis say the rest, and are imported only when asked for: each has its
# own needs.
COMMANDS = {
    "gradients": "Figure 3: the gradient norm at every residual block",
    "ratio": "x:F in every block, learned gains, effective scale",
    "depth": "gradients, branches and tokens against depth",
    "curves": "Figure 4: training loss and validation metric of runs",
    "course": "x:F, branch and gradient norms over a training",
}


MEASURE_MODELS = ("gradients", "ratio")  # that the command line names; the others read logs, or make stacks


def add_options(name: str, parser: argparse.ArgumentParser) -> Any:
    """Add the options of a command to ``parser``; returns the command's module.

    Raises ``ImportError`` if that needs a package that is missing.
    """
    command = importlib.import_module(f"fairseq_rskip.analysis.{name}")
    parser.add_argument(
        "--output", required=True, metavar="STEM", help="what to write, without an ending: STEM.csv, .png, .pdf"
    )
    if name in MEASURE_MODELS:
        from .models import add_model_arguments

        add_model_arguments(parser, command.EXAMPLES)
    else:
        command.add_arguments(parser)
    return command


def parse(argv: list[str]) -> argparse.Namespace:
    """The options, with the command's module as ``command``."""
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="name", metavar="COMMAND [options]", required=True)
    for name, line in COMMANDS.items():
        subparser = commands.add_parser(name, help=line)
        if argv[:1] == [name]:
            command = add_options(name, subparser)
            subparser.description = command.__doc__
            subparser.set_defaults(command=command)
    return parser.parse_args(argv)


def run(argv: list[str]) -> None:
    """Every command has ``report(study, stem)``; where it measures no models, its options are the study."""
    study = options = parse(argv)
    stem = figures.check_stem(options.output)
    if options.name in MEASURE_MODELS:
        from .models import load_study

        study = load_study(options)
    options.command.report(study, stem)


def main(argv: list[str] | None = None) -> int:
    """Run the command line ``argv``; returns the exit status."""
    return exit_status(lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
