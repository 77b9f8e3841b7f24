"""The command line of scripts/evaluate.sh, which is checked before torch and fairseq are imported."""

from argparse import Namespace
from pathlib import Path

from fairseq_rskip.console import Parser, finite, whole_number
from fairseq_rskip.errors import exit_status
from fairseq_rskip.tools.evaluate.generation import DEFAULT_LENPEN
from fairseq_rskip.tools.process import stop_on_signals

DESCRIPTION = """Average the last checkpoints, translate with beam search, score against the raw references.

DATA is what data-prep/prepare-*.sh made: the folder with preparation.json, its parent, or a corpus' name in data/.
CHECKPOINT-DIR is where training saved to. OUT gets generate.log, hyp.tok (subwords joined), hyp.txt (detokenised) and
scores.json. A finished generation is not repeated while checkpoints, data and options stay what they were.
See docs/evaluation.md."""


def parse(argv: list[str] | None = None) -> Namespace:
    """The options, defaults filled in. A mistake ends the program with one line."""
    parser = Parser(description=DESCRIPTION)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("folder", type=Path, metavar="CHECKPOINT-DIR")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument(
        "--average",
        type=whole_number(0),
        default=5,
        metavar="N",
        help="average the last N epochs' or updates' checkpoints (5); 0: checkpoint_best.pt, else checkpoint_last.pt",
    )
    weights.add_argument("--checkpoint", type=Path, metavar="FILE", help="take this one, by path or name in the folder")
    parser.add_argument("--subset", choices=("test", "valid"), default="test", help="which sentences (test)")
    parser.add_argument("--beam", type=whole_number(1), default=4, metavar="N", help="beam size (4)")
    parser.add_argument(
        "--lenpen",
        type=finite,
        default=DEFAULT_LENPEN,
        metavar="A",
        help="score / length^A (0.5: near tensor2tensor's alpha 0.6)",
    )
    parser.add_argument("--max-tokens", type=whole_number(1), default=8000, metavar="N", help="tokens per batch (8000)")
    parser.add_argument("--cpu", action="store_true", help="leave a GPU alone")
    parser.add_argument("--fp32", action="store_true", help="full precision on a GPU, too")
    parser.add_argument("--out", type=Path, help="where results go (CHECKPOINT-DIR/evaluation-SUBSET)")
    options = parser.parse_args(argv)
    options.out = options.out or options.folder / f"evaluation-{options.subset}"
    return options


def main(argv: list[str] | None = None) -> int:
    """Do what ``argv`` asks for; returns the exit status. What goes wrong is one line on standard error."""
    options = parse(argv)
    stop_on_signals()

    def work() -> None:
        from fairseq_rskip.tools.evaluate.main import evaluate  # takes seconds: after the options have been checked

        evaluate(options)

    return exit_status(work, interrupted="interrupted; the same command resumes from what is complete")
