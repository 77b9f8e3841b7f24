"""``rskip describe``: the command line, which reads its arguments before torch is loaded."""

from collections.abc import Sequence

from fairseq_rskip.console import Parser

PROGRAM = "rskip describe"
USAGE = f"{PROGRAM} ARCH [OPTIONS]\n       {PROGRAM} MODEL"
ABOUT = """Print every skip connection of a model: its place, its rule and constants, its norm, the
parameters that both add, and the standard deviation of each matrix of its branch as a multiple of
Xavier's. The number of a Transformer's parameters is without embeddings and output projection,
whose size is the vocabulary's.

ARCH is an architecture such as transformer_rskip_ln, followed by any model option of fairseq-train
(--encoder-layers 18), or resnet110, followed by those of train_cifar.py (--skip-kind xskip). It is
described at initialisation. MODEL is a trained one: a checkpoint (FILE.pt), the folder of a
training, a folder that rskip export wrote, or the name of a model that comes with the package."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table. Raises ``UserError`` for an unknown architecture, option or file."""
    parser = Parser(prog=PROGRAM, usage=USAGE, description=ABOUT)
    parser.add_argument("arch", metavar="ARCH or MODEL", help="architecture, checkpoint or folder")
    options, model_options = parser.parse_known_args(argv)
    from fairseq_rskip.tools.description import describe

    describe(options.arch, model_options)
