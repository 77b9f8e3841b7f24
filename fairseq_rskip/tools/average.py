"""Average the weights of several fairseq checkpoints into one.

    rskip average --inputs DIR --last 5 --output DIR/averaged.pt
    rskip average --inputs a.pt b.pt c.pt --output averaged.pt

Of a folder, the newest are averaged. Settings are those of the first file or the newest; the
optimizer's state is dropped.
"""

from pathlib import Path

from fairseq_rskip.console import Parser, whole_number
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import make_folder


def main(argv: list[str] | None = None) -> None:
    """Write the average and print which checkpoints it is of. Raises ``UserError``."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--inputs", type=Path, nargs="+", required=True, metavar="PATH", help="files, or one folder"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the checkpoint to write"
    )
    parser.add_argument(
        "--last", type=whole_number(1), default=5, metavar="N", help="checkpoints of a folder (5)"
    )
    options = parser.parse_args(argv)
    from fairseq_rskip.tools.evaluate.weights import choose, save  # seconds: after the options

    paths = options.inputs
    which = f"average of {', '.join(map(str, paths))}"
    if paths[0].is_dir():
        if len(paths) > 1:
            raise UserError(
                f"--inputs {' '.join(map(str, paths))}: expected one folder, or several files"
            )
        paths, which = choose(paths[0], options.last)
    make_folder(options.output.parent)
    save(paths, options.output)
    print(f"{which}; written to {options.output}")
