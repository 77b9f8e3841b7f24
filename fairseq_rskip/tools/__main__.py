"""``rskip COMMAND ...``: every command of the package; also ``python -m fairseq_rskip.tools``."""

import importlib
import os
import sys

from fairseq_rskip import __version__
from fairseq_rskip.errors import did_you_mean, exit_status
from fairseq_rskip.machine import share_cores

# command -> (module:function of this package, purpose); only the command's own module is imported
COMMANDS = {
    "prepare": ("tools.prepare.main:main", "prepare a published corpus, or your own text"),
    "train": ("tools.train.main:main", "train an architecture with a corpus's settings"),
    "evaluate": ("tools.evaluate.main:main", "average checkpoints, translate a subset, score it"),
    "score": ("tools.score:main", "score a translation"),
    "compare": ("tools.compare:main", "compare models: scores, lengths, significance"),
    "average": ("tools.average:main", "average the weights of several fairseq checkpoints"),
    "translate": (
        "tools.translate:main",
        "translate standard input with a checkpoint or an export",
    ),
    "run": (
        "tools.reproduce:run_file",
        "prepare, train, evaluate and report what a YAML file lists",
    ),
    "report": ("tools.reproduce:report_file", "write the report of a YAML file again"),
    "reproduce": ("tools.reproduce:main", "run, report and list tables of experiments"),
    "export": ("tools.export.main:main", "write a model as a folder to share"),
    "describe": ("tools.describe:main", "print every skip connection of a model"),
    "analyze": (
        "tools.analyze:run",
        "measure gradients, x:F ratios and depth; draw curves of runs",
    ),
    "train-cifar": ("vision.main:main", "train a PreAct-ResNet on CIFAR, image folders or digits"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command that ``argv`` names; return its exit status, 2 for an unknown command."""
    argv = sys.argv[1:] if argv is None else argv
    share_cores()
    if not argv or argv[0] in ("-h", "--help"):
        rows = "\n".join(f"  {name:12}  {purpose}" for name, (_, purpose) in COMMANDS.items())
        print(
            f"usage: rskip COMMAND [option ...]\n\n{rows}\n\n"
            "rskip COMMAND -h lists the options of a command."
        )
        return 0
    if argv[0] == "--version":
        print(f"fairseq_rskip {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        hint = did_you_mean(argv[0], COMMANDS) or f"it has {', '.join(COMMANDS)}"
        print(f"error: rskip has no command {argv[0]!r}; {hint}", file=sys.stderr)
        return 2
    # a usage line begins with the script's name where a script called this
    sys.argv[0] = os.environ.pop("RSKIP_PROG", f"rskip {argv[0]}")
    module, _, function = COMMANDS[argv[0]][0].partition(":")

    def call() -> int | None:
        command = getattr(importlib.import_module(f"fairseq_rskip.{module}"), function)
        return command(argv[1:])

    return exit_status(call)


if __name__ == "__main__":
    sys.exit(main())
