"""MODEL on the command line of analyze.py: what it may be, and how all of them become one study."""

import argparse
import shlex
from pathlib import Path

from ..analysis.curves import split
from ..analysis.study import Source, Study
from ..console import progress, whole_number
from ..errors import UserError
from ..safe_load import CheckpointError, load_checkpoint
from ..vision.run import CHECKPOINT, FORMAT

FRESH = "fresh:"
EPILOG = """\
MODEL is one of
  LABEL=PATH              a seed folder or checkpoint.pt of train_cifar.py, or a checkpoint of fairseq-train;
                          a PATH alone is called by its folder's name
  'LABEL=fresh:OPTIONS'   a freshly initialised ResNet, OPTIONS as of train_cifar.py:
                          'plain=fresh:--depth 20 --skip-kind xskip --skip-lambda 1 --skip-norm none'
  'LABEL=fresh:ARCH ...'  a freshly initialised Transformer, options as of fairseq-train --arch ARCH; needs --data:
                          '3rSkip+LN=fresh:transformer_rskip_ln_iwslt_de_en --skip-lambda 3'
All models of one call are ResNets or all are Transformers, and see the same examples. A fresh network's batch norms get
their running statistics from 10 batches of them in training mode; nothing is trained.
"""


def add_model_arguments(parser: argparse.ArgumentParser, examples: int) -> None:
    """MODEL and the options that say which examples the models see."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("models", nargs="+", metavar="MODEL", help="[LABEL=]PATH or 'LABEL=fresh:...', see below")
    parser.add_argument(
        "--examples",
        type=whole_number(1),
        default=examples,
        metavar="N",
        help="images or sentence pairs (default: %(default)s)",
    )
    parser.add_argument(
        "--data",
        default="",
        help="cifar10, cifar100, digits or imagefolder:PATH for ResNets, a data-bin for Transformers"
        " (default: what the checkpoints were trained on)",
    )
    parser.add_argument("--split", default="train", help="train or test; of a data-bin any (default: %(default)s)")
    parser.add_argument("--cache", default="", help="where decoded image folders are kept (default: as in training)")
    parser.add_argument("--data-dir", default="", help="where cifar10 and cifar100 are (default: as in training)")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of examples and of fresh networks")
    parser.add_argument("--batch-size", type=whole_number(1), default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes a GPU")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), help="of a ResNet this stage only; the paper shows 2")


def load_study(options: argparse.Namespace) -> Study:
    """The study that the command line asks for.

    Raises ``UserError`` that names the model, and the layer where there is one to name.
    """
    models = [_source(text) for text in options.models]
    labels = [source.label for source in models]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise UserError(f"MODEL {twice}: two models have this label: say LABEL=PATH")
    models = [_read(source) for source in progress(models, len(models), "reading", "model")]
    images = [source for source in models if _is_vision(source)]
    if images and len(images) < len(models):
        other = next(source for source in models if source not in images)
        raise UserError(f"{images[0]} is a ResNet and {other} a Transformer: they do not share examples, analyse apart")
    if images:
        from . import resnets as half
    elif options.stage:
        raise UserError("--stage: expected with ResNets only, Transformers have none")
    else:
        try:
            from . import transformers as half
        except ImportError as error:
            raise UserError(f"Transformers need fairseq, which does not import here: {error}") from None
    study = half.study(models, options)
    for source in models:
        if source.state is None:
            study.calibrate(source.label, options.seed)
    return study


def _source(text: str) -> Source:
    label, _, source = text.partition("=")
    if not text.strip("=") or text.startswith(FRESH) or (label and not source and "=" in text):
        raise UserError(f"MODEL {text!r}: expected LABEL=PATH, PATH or 'LABEL=fresh:...'")
    if not source.startswith(FRESH):
        label, path = split(text)
        alone = path == text and Path(path).is_file()
        return Source(Path(path).resolve().parent.name if alone else label, path=path)
    try:
        words = shlex.split(source[len(FRESH) :])
    except ValueError as error:
        raise UserError(f"MODEL {text!r}: {error}") from None
    if not words:
        raise UserError(f"MODEL {text!r}: expected options of train_cifar.py or an architecture after {FRESH}")
    return Source(label, fresh=tuple(words))


def _read(source: Source) -> Source:
    """``source`` with its checkpoint, if it is one."""
    if source.fresh:
        return source
    path = Path(source.path).expanduser()
    if path.is_dir():
        if not (path / CHECKPOINT).is_file():
            seeds = ", ".join(str(seed.parent) for seed in sorted(path.glob(f"seed*/{CHECKPOINT}"))[:4])
            expected = f"one seed's folder, say which: {seeds}" if seeds else "a folder or checkpoint of a training"
            raise UserError(f"{source} holds no {CHECKPOINT}: expected {expected}")
        path = path / CHECKPOINT
    source = source._replace(path=str(path))
    try:
        state = load_checkpoint(path, map_location="cpu")
    except CheckpointError as error:
        raise CheckpointError(f"{source.label}: {error}") from None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise CheckpointError(f"{source} is no checkpoint of train_cifar.py or fairseq-train: it has no entry 'model'")
    # fairseq reads its own checkpoints again: settings of older versions need its conversion
    return source._replace(state=state if state.get("format") == FORMAT else {})


def _is_vision(source: Source) -> bool:
    if source.state is None:
        return source.fresh[0].startswith("-")
    return source.state.get("format") == FORMAT
