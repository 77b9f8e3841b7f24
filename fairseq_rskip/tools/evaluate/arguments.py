"""The command line of ``rskip evaluate``, which is checked before torch and fairseq are imported."""

from argparse import Namespace
from pathlib import Path

from fairseq_rskip.console import Parser, finite, whole_number
from fairseq_rskip.errors import exit_status
from fairseq_rskip.tools.process import stop_on_signals

DESCRIPTION = """Average the last checkpoints, translate with beam search, score against the raw references.

DATA is a prepared corpus: the folder with preparation.json, its parent, or the name of a corpus in data/.
CHECKPOINT-DIR is where training saved to. OUT gets generate.log, hyp.tok (subwords joined), hyp.txt (detokenised) and
scores.json. A finished generation is not repeated while checkpoints, data and options are the same.
See docs/evaluation.md."""
# tensor2tensor divides a log-probability by ((5 + L) / 6)^0.6 (Wu et al. 2016, equation 14), fairseq by L^lenpen. What
# chooses between hypotheses of about L tokens is the elasticity: lenpen, and 0.6 L / (L + 5), or 0.5 at 25 subwords.
DEFAULT_LENPEN = 0.5


def add_search(parser: Parser) -> None:
    """Add the options of the beam search and its device."""
    parser.add_argument("--beam", type=whole_number(1), default=4, metavar="N", help="beam size (4)")
    penalty = "divide a hypothesis's score by length^A (0.5: near tensor2tensor's alpha 0.6)"
    parser.add_argument("--lenpen", type=finite, default=DEFAULT_LENPEN, metavar="A", help=penalty)
    parser.add_argument("--cpu", action="store_true", help="decode on the CPU")


def parse(argv: list[str] | None = None) -> Namespace:
    """The options, defaults filled in. A mistake ends the program with one line."""
    parser = Parser(description=DESCRIPTION)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("folder", type=Path, metavar="CHECKPOINT-DIR")
    weights = parser.add_mutually_exclusive_group()
    last = "average the last N checkpoints of epochs or updates (5); 0: checkpoint_best.pt, else checkpoint_last.pt"
    weights.add_argument("--average", type=whole_number(0), default=5, metavar="N", help=last)
    weights.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="evaluate this one: a path or a name in the folder"
    )
    parser.add_argument("--subset", choices=("test", "valid"), default="test", help="which sentences (test)")
    add_search(parser)
    parser.add_argument("--max-tokens", type=whole_number(1), default=8000, metavar="N", help="tokens per batch (8000)")
    parser.add_argument("--fp32", action="store_true", help="decode in full precision on a GPU, too")
    parser.add_argument("--out", type=Path, help="folder of the results (CHECKPOINT-DIR/evaluation-SUBSET)")
    options = parser.parse_args(argv)
    options.out = options.out or options.folder / f"evaluation-{options.subset}"
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status. An error is one line on standard error."""
    options = parse(argv)
    stop_on_signals()

    def work() -> None:
        from fairseq_rskip.tools.evaluate.main import evaluate  # takes seconds: after the options have been checked

        evaluate(options)

    return exit_status(work, interrupted="interrupted; the same command resumes from what is complete")
