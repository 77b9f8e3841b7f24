"""``rskip COMMAND ...``: every command line of the package by one name (also ``python -m fairseq_rskip.tools``)."""

import importlib
import sys

from fairseq_rskip import __version__
from fairseq_rskip.errors import exit_status

# command -> (module whose main(argv) it calls, what it does); a module is imported when its command is called
COMMANDS = {
    "train": ("fairseq_rskip.tools.train.main", "train an architecture with a corpus's settings"),
    "evaluate": ("fairseq_rskip.tools.evaluate.arguments", "average checkpoints, translate a subset, score it"),
    "score": ("fairseq_rskip.tools.score", "score a translation"),
    "compare": ("fairseq_rskip.tools.compare", "compare checkpoints or translations: scores, lengths, significance"),
    "average": ("fairseq_rskip.tools.average", "average the weights of several fairseq checkpoints"),
    "run": ("fairseq_rskip.tools.experiments.main", "one YAML file: prepare, train, evaluate, report"),
    "export": ("fairseq_rskip.tools.export.main", "a model as a folder to share: weights, text processing, a card"),
    "describe": ("fairseq_rskip.tools.describe", "every skip connection of a model, with its constants and starts"),
    "reproduce": ("fairseq_rskip.tools.experiments.main", "run and report experiments, a YAML table of them"),
    "analyze": ("fairseq_rskip.tools.analyze", "gradients, x:F ratios and depth of models; curves of runs"),
    "train-cifar": ("fairseq_rskip.vision.main", "train a PreAct-ResNet on CIFAR, image folders or digits"),
}


def usage() -> str:
    rows = "\n".join(f"  {name:12}  {purpose}" for name, (_, purpose) in COMMANDS.items())
    return f"usage: rskip COMMAND [option ...]\n\n{rows}\n\nrskip COMMAND -h lists a command's options."


def main(argv: list[str] | None = None) -> int:
    """Exit status of the command that ``argv`` names; 2 if there is none of that name."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        print(f"fairseq_rskip {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        print(f"error: rskip has no command {argv[0]!r}; it has {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    sys.argv[0] = f"rskip {argv[0]}"  # what a usage line begins with
    return exit_status(lambda: importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
