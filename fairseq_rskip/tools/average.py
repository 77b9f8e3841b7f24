"""Average the weights of several fairseq checkpoints into one.

    rskip average --inputs DIR --num-update-checkpoints 5 --output DIR/averaged.pt
    rskip average --inputs a.pt b.pt c.pt --output averaged.pt

Settings come from the first input (of a folder: the newest). The optimizer's state is left out. Without a number, the
last five checkpoints of a folder are averaged, as by rskip evaluate.
"""

from pathlib import Path

from fairseq_rskip.console import Parser, whole_number
from fairseq_rskip.errors import UserError


def main(argv: list[str] | None = None) -> None:
    """Write the average and print which checkpoints it is of. Raises ``UserError``."""
    parser = Parser(description=__doc__)
    checkpoints = {"nargs": "+", "type": Path, "required": True, "metavar": "PATH"}
    parser.add_argument("--inputs", **checkpoints, help="checkpoints, or one folder")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the checkpoint to write")
    number = parser.add_mutually_exclusive_group()
    for unit, form in (("epoch", "checkpoint<epoch>.pt"), ("update", "checkpoint_<epoch>_<update>.pt")):
        name = f"--num-{unit}-checkpoints"
        number.add_argument(name, type=whole_number(1), metavar="N", help=f"average the last N of {form}")
    options = parser.parse_args(argv)
    from fairseq_rskip.tools.evaluate.weights import choose, save  # takes seconds: after the options

    unit = "epoch" if options.num_epoch_checkpoints else "update" if options.num_update_checkpoints else None
    (folder, *more), count = options.inputs, options.num_epoch_checkpoints or options.num_update_checkpoints
    paths = options.inputs
    if unit or folder.is_dir():
        if more:
            raise UserError(f"--inputs {folder} and others: expected one folder, or checkpoints without a number")
        paths, which = choose(folder, count or 5, unit=unit)
        if unit and len(paths) < count:
            raise UserError(f"{folder} has no {count} {unit} checkpoints, only: {which}")
    save(paths, options.output)
    print(f"averaged {', '.join(map(str, paths))} into {options.output}")
