"""``rskip describe``: the command line, which reads its arguments before torch is loaded."""

from collections.abc import Sequence

from fairseq_rskip.console import Parser

ABOUT = """Print every skip connection of a model: its place, its rule and constants, its norm, the parameters that both
add, and the standard deviation of each matrix of its branch as a multiple of Xavier's. The number of a Transformer's
parameters is without embeddings and output projection, whose size is the vocabulary's.

ARCH is an architecture such as transformer_rskip_ln, followed by any model option of fairseq-train (--encoder-layers
18), or resnet110, followed by those of train_cifar.py (--skip-kind xskip)."""
PROGRAM = "rskip describe"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table. Raises ``UserError`` for an unknown architecture or option."""
    parser = Parser(prog=PROGRAM, usage=f"{PROGRAM} ARCH [OPTIONS]", description=ABOUT)
    parser.add_argument("arch", metavar="ARCH", help="architecture")
    options, model_options = parser.parse_known_args(argv)
    from fairseq_rskip.tools.description import describe

    describe(options.arch, model_options)
