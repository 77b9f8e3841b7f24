"""The MODELs of rskip analyze's command line: how all of them become one study."""

import argparse
import shlex
from collections import Counter
from importlib import import_module
from pathlib import Path

from ..analysis.curves import split
from ..analysis.study import Source, Study
from ..console import print_line, progress
from ..errors import UserError
from ..safe_load import CheckpointError, load_checkpoint
from ..vision.run import CHECKPOINT, FORMAT
from .evaluate.weights import choose

FRESH = "fresh:"


def load_study(options: argparse.Namespace) -> Study:
    """The study of the models and examples that the command line names. Raises ``UserError`` that names the model."""
    models = [_source(text) for text in options.models]
    if twice := next((label for label, count in Counter(source.label for source in models).items() if count > 1), None):
        raise UserError(f"MODEL {twice}: two models have this label: say LABEL=PATH")
    models = [source if source.fresh else _read(source) for source in progress(models, len(models), "reading", "model")]
    resnets = [m for m in models if (m.fresh[0].startswith("-") if m.fresh else m.state.get("format") == FORMAT)]
    if resnets and len(resnets) < len(models):
        raise UserError(f"{resnets[0]} is a ResNet, others are Transformers: they share no examples")
    if options.stage and not resnets:
        raise UserError("--stage: expected with ResNets only, Transformers have none")
    study = import_module(f".{'resnets' if resnets else 'transformers'}", __package__).study(models, options)
    for source in models:
        if source.state is None:
            study.calibrate(source.label, options.seed)
    return study


def _source(text: str) -> Source:
    label, _, source = text.partition("=")
    if source.startswith(FRESH):
        try:
            if words := shlex.split(source[len(FRESH) :]):
                return Source(label, fresh=tuple(words))
        except ValueError as error:
            raise UserError(f"MODEL {text!r}: {error}") from None
    elif label and (source or "=" not in text) and not text.startswith(FRESH):
        label, path = split(text)
        alone = path == text and Path(path).is_file()
        return Source(Path(path).resolve().parent.name if alone else label, path=path)
    raise UserError(f"MODEL {text!r}: expected LABEL=PATH, PATH or 'LABEL=fresh:...'")


def _read(source: Source) -> Source:
    """``source`` with its checkpoint."""
    path = Path(source.path).expanduser()
    if seeds := ", ".join(str(seed.parent) for seed in sorted(path.glob(f"seed*/{CHECKPOINT}"))[:4]):
        raise UserError(f"{source} is a folder of seeds: expected one of {seeds}")
    if (path / CHECKPOINT).is_file():
        path = path / CHECKPOINT
    elif path.is_dir():
        (path, *_), which = choose(path, 0)
        print_line(f"{source.label}: {which}")
    source, state = source._replace(path=str(path)), load_checkpoint(path, map_location="cpu")
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise CheckpointError(f"{source} is no checkpoint of train_cifar.py or fairseq-train: it has no entry 'model'")
    # fairseq reads its own checkpoints again, to convert settings of older versions
    return source._replace(state=state if state.get("format") == FORMAT else {})
