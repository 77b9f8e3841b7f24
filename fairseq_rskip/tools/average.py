"""Average the weights of several fairseq checkpoints into one.

    rskip average --inputs DIR --num-update-checkpoints 5 --output DIR/averaged.pt
    rskip average --inputs a.pt b.pt c.pt --output averaged.pt

Settings come from the first input (of a folder: the newest). The optimizer's state is left out.
"""

import argparse
from pathlib import Path

from fairseq_rskip.console import Parser, whole_number
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.tools.train.save import numbered


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options. A mistake ends the program with one line."""
    parser = Parser(prog="rskip average", description=__doc__)
    parser.add_argument("--inputs", nargs="+", type=Path, required=True, help="checkpoints, or one folder of them")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the checkpoint to write")
    number = parser.add_mutually_exclusive_group()
    for unit, form in (("epoch", "checkpoint<epoch>.pt"), ("update", "checkpoint_<epoch>_<update>.pt")):
        name = f"--num-{unit}-checkpoints"
        number.add_argument(name, type=whole_number(1), metavar="N", help=f"average the last N of {form}")
    return parser.parse_args(argv)


def choose(options: argparse.Namespace) -> list[Path]:
    """The checkpoints that the command line names. Raises ``UserError``."""
    unit = "epoch" if options.num_epoch_checkpoints else "update"
    count, folders = getattr(options, f"num_{unit}_checkpoints"), [path for path in options.inputs if path.is_dir()]
    if count is None and not folders:
        return options.inputs
    if count is None:
        raise UserError(f"{folders[0]} is a folder: add --num-epoch-checkpoints N or --num-update-checkpoints N")
    if len(options.inputs) != 1 or not folders:
        raise UserError(f"--num-{unit}-checkpoints needs one folder as --inputs")
    paths = [path for _, path in numbered(folders[0], unit)]
    if len(paths) < count:
        raise UserError(f"{folders[0]} holds {len(paths)} {unit} checkpoints, {count} are needed")
    return paths[:count]


def run(options: argparse.Namespace) -> None:
    """Write the average and print which checkpoints it is of. Raises ``UserError``."""
    from fairseq_rskip.tools.evaluate.weights import average, save  # takes seconds: after the options were checked

    paths = choose(options)
    save(average(paths), options.output)
    print(f"averaged {', '.join(map(str, paths))} into {options.output}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = parse(argv)
    return exit_status(lambda: run(options))
