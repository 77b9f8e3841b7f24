"""Why a skip connection helps: figures and tables from checkpoints and logs (docs/analysis.md)."""

import argparse
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..console import Parser, between, label_and_path, whole_number
from ..errors import UserError

MODELS = """\
MODEL is one of
  LABEL=PATH              a seed folder or checkpoint.pt of train_cifar.py, or a checkpoint or
                          --save-dir of fairseq-train (its checkpoint_best.pt); the label of a PATH
                          alone is its folder's name
  'LABEL=fresh:OPTIONS'   a freshly initialised ResNet, with options of train_cifar.py:
                          'plain=fresh:--depth 20 --skip-kind xskip --skip-lambda 1
                          --skip-norm none'
  'LABEL=fresh:ARCH ...'  a freshly initialised Transformer, with options of
                          fairseq-train --arch ARCH; needs --data:
                          '3rSkip+LN=fresh:transformer_rskip_ln_iwslt_de_en --skip-lambda 3'
All models of one call are ResNets, or translation models, or language models, and see the same
examples. A fresh network's batch norms get their running statistics from 10 batches of them in
training mode; nothing is trained.
"""

LOGS = """\
depth-check takes one MODEL: the folder of a training that logged its skip connections, or the log
itself, is read, and the options of examples have no effect; any other MODEL is measured.
"""


def run(argv: list[str]) -> None:
    """Run the command in ``argv``. Torch is imported after the options have been read."""
    options = parse(argv)
    from ..analysis.figures import check_stem

    if not options.output or options.output.endswith("/"):
        raise UserError(
            f"--output {options.output!r}: expected how the names of the files begin, such as "
            f"{options.output}{options.name}"
        )
    stem = check_stem(options.output)
    COMMANDS[options.name].run(options, stem)


def parse(argv: list[str]) -> Namespace:
    """The command in ``argv``, its ``name``, and its options. Raises ``UsageError``."""
    parser = Parser(prog="rskip analyze", description=__doc__)
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        usage = f"rskip analyze {name} [--output STEM] [options]"
        words = {"help": command.purpose, "description": command.purpose, "usage": usage}
        options_of_it = commands.add_parser(name, **words)
        stem = f"figures/{name}"
        options_of_it.add_argument(
            "--output",
            default=stem,
            metavar="STEM",
            help=f"write STEM.csv, STEM.png and STEM.pdf ({stem})",
        )
        command.add_options(options_of_it)
    return parser.parse_args(argv)


def _add_models(parser: argparse.ArgumentParser, examples: int) -> None:
    """MODELs, and the examples that they see."""
    add = parser.add_argument
    parser.epilog = MODELS
    add("models", nargs="+", metavar="MODEL", help="[LABEL=]PATH or 'LABEL=fresh:...', see below")
    add(
        "--examples",
        type=whole_number(1),
        default=examples,
        metavar="N",
        help=f"images or sentence pairs ({examples})",
    )
    data = "cifar10, cifar100, digits, imagefolder:PATH or data-bin (that of the training)"
    add("--data", default="", help=data)
    add("--split", default="train", help="train or test; of a data-bin any (train)")
    cache = "folder of decoded image folders (that of the training)"
    add("--cache", default="", metavar="DIR", help=cache)
    data_dir = "folder of cifar10 and cifar100 (that of the training)"
    add("--data-dir", default="", metavar="DIR", help=data_dir)
    add("--seed", type=int, default=1, help="seed of the examples and of fresh networks (1)")
    size = "examples of a batch (64)"
    add("--batch-size", type=whole_number(1), default=64, metavar="N", help=size)
    device = "auto: a GPU if there is one"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=device)
    stage = "show this stage of ResNets only; the paper shows 2"
    add("--stage", type=int, choices=(1, 2, 3), help=stage)


def _add_depth_check(parser: argparse.ArgumentParser) -> None:
    _add_models(parser, examples=1_000)
    parser.epilog = f"{LOGS}\n{MODELS}"


def _add_stacks(parser: argparse.ArgumentParser) -> None:
    """Stacks of blocks at initialisation."""
    add, count = parser.add_argument, whole_number
    add("--blocks", type=count(2), default=50, metavar="N", help="blocks of a stack (50)")
    add("--dim", type=count(4), default=64, metavar="N", help="features, a multiple of 4 (64)")
    ratio = "expected ||F(x)||/||x|| of a branch (0.25)"
    add("--gain", type=between(0, 1e300), default=0.25, metavar="X", help=ratio)
    add("--seeds", type=count(1), default=5, metavar="N", help="stacks to average over (5)")
    inputs = "inputs of a stack to average over (32)"
    add("--examples", type=count(1), default=32, metavar="N", help=inputs)
    tokens = "tokens of an input of self-attention (16)"
    add("--tokens", type=count(2), default=16, metavar="N", help=tokens)


def _add_runs(parser: argparse.ArgumentParser) -> None:
    """Folders of trainings, of which the logs are read."""
    runs = "a training's folder; LABEL is its name by default"
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]RUN", help=runs)


def _add_curves(parser: argparse.ArgumentParser) -> None:
    _add_runs(parser)
    first = "leave out what is before iteration N"
    parser.add_argument("--first", type=int, default=0, metavar="N", help=first)


def _add_course(parser: argparse.ArgumentParser) -> None:
    _add_runs(parser)
    by_block = "against depth: each block at the last update"
    parser.add_argument("--by-block", action="store_true", help=by_block)


def _gradients(options: Namespace, stem: Path) -> None:
    from ..analysis.gradients import report

    report(_study(options), stem)


def _ratio(options: Namespace, stem: Path) -> None:
    from ..analysis.ratio import report

    report(_study(options), stem)


def _streams(options: Namespace, stem: Path) -> None:
    from ..analysis.streams import report

    report(_study(options), stem)


def _reads(options: Namespace, stem: Path) -> None:
    from ..analysis.reads import report

    report(_study(options), stem)


def _depth(options: Namespace, stem: Path) -> None:
    from ..analysis.depth import report

    _prepare_machine()
    report(options, stem)


def _curves(options: Namespace, stem: Path) -> None:
    from ..analysis.curves import report

    report(_trainings(options.runs), options.first, stem)


def _course(options: Namespace, stem: Path) -> None:
    from ..analysis.curves import course

    course(_trainings(options.runs), options.by_block, stem)


def _depth_check(options: Namespace, stem: Path) -> None:
    from ..analysis.depth_check import report

    report(options.models, stem, lambda: _study(options))


class Command(NamedTuple):
    """A command: ``run`` takes the options that ``add_options`` adds, and STEM."""

    purpose: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Namespace, Path], None]


COMMANDS = {
    "gradients": Command(
        "Figure 3: the gradient norm at every residual block",
        lambda parser: _add_models(parser, examples=10_000),
        _gradients,
    ),
    "ratio": Command(
        "x:F in every block, learned gains, effective scale",
        lambda parser: _add_models(parser, examples=1_000),
        _ratio,
    ),
    "streams": Command(
        "the streams of hyper-connections: do they differ, do they mix, what moved",
        lambda parser: _add_models(parser, examples=200),
        _streams,
    ),
    "reads": Command(
        "what attention residuals, MUDD and their kin read of earlier outputs",
        lambda parser: _add_models(parser, examples=200),
        _reads,
    ),
    "depth": Command(
        "gradients, branches and tokens against depth, in stacks at initialisation",
        _add_stacks,
        _depth,
    ),
    "curves": Command(
        "Figure 4: training loss and validation metric of runs", _add_curves, _curves
    ),
    "course": Command(
        "x:F, branch and gradient norms over a training with --skip-log-interval",
        _add_course,
        _course,
    ),
    "depth-check": Command(
        "what the residuals of a stack pass on of the gradient",
        _add_depth_check,
        _depth_check,
    ),
}


def _study(options: Namespace) -> Any:
    """The study of the models that ``options`` name."""
    from .models import load_study  # takes seconds to import

    _prepare_machine(options.device)
    return load_study(options)


def _prepare_machine(device: str = "cpu") -> None:
    """Load the operator from the start or never: the same input gives the same bytes."""
    from ..machine import keep_freed_memory, load_operator

    if device != "cuda":
        keep_freed_memory()
    load_operator()


def _trainings(arguments: list[str]) -> list[str]:
    """``LABEL=FOLDER`` for each folder of fairseq's checkpoints in the RUN of ``LABEL=RUN``.

    RUN is a run of rskip run, or a seed's folder in it; any other argument stays as it is.
    """
    from .training_files import CHECKPOINTS

    expanded = []
    for argument in arguments:
        label, path = label_and_path(argument)
        folders = [Path(path, CHECKPOINTS), *sorted(Path(path).glob(f"seed*/{CHECKPOINTS}"))]
        inside = [f"{label}={folder}" for folder in folders if folder.is_dir()]
        expanded += inside or [argument]
    return expanded
