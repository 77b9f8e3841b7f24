"""The MODELs of rskip analyze's command line: how all of them become one study."""

import argparse
import shlex
from collections import Counter
from pathlib import Path

from ..analysis.study import Study
from ..console import label_and_path, print_line, progress
from ..errors import UserError
from ..vision.run import FORMAT
from .saved_model import IMAGES, find_saved, read_checkpoint
from .source import Source

FRESH = "fresh:"


def load_study(options: argparse.Namespace) -> Study:
    """The study of the models and examples of the command line.

    Raises ``UserError`` that names the model.
    """
    named = [_source(text) for text in options.models]
    counts = Counter(source.label for source in named)
    for label, count in counts.items():
        if count > 1:
            raise UserError(f"MODEL {label}: two models have this label: say LABEL=PATH")
    models = []
    for source in progress(named, len(named), "reading", "model"):
        models.append(source if source.fresh else _read(source))
    resnets = [source for source in models if _is_resnet(source)]
    if resnets and len(resnets) < len(models):
        raise UserError(
            f"{resnets[0]} is a ResNet, others are Transformers: they share no examples"
        )
    if options.stage and not resnets:
        raise UserError("--stage: expected with ResNets only, Transformers have none")
    if resnets:
        from .resnets import study as make_study
    else:
        from .transformers import study as make_study  # imports fairseq, which takes seconds
    study = make_study(models, options)
    for source in models:
        if source.fresh:
            study.calibrate(source.label, options.seed)
    return study


def _is_resnet(source: Source) -> bool:
    if source.fresh:
        return source.fresh[0].startswith("-")
    return source.state.get("format") == FORMAT


def _source(text: str) -> Source:
    wrong = UserError(f"MODEL {text!r}: expected LABEL=PATH, PATH or 'LABEL=fresh:...'")
    label, equals, rest = text.partition("=")
    if not label or (equals and not rest) or text.startswith(FRESH):
        raise wrong
    if rest.startswith(FRESH):
        try:
            words = shlex.split(rest.removeprefix(FRESH))
        except ValueError as error:
            raise UserError(f"MODEL {text!r}: {error}") from None
        if not words:
            raise wrong
        return Source(label, fresh=tuple(words))

    label, path = label_and_path(text)
    if path == text and Path(path).is_file():  # a checkpoint alone is called as its folder
        label = Path(path).resolve().parent.name
    return Source(label, path=path)


def _read(source: Source) -> Source:
    """``source`` with its checkpoint."""
    saved = find_saved(Path(source.path), average=False, exports=False)
    path = saved.paths[0]
    if saved.which:
        print_line(f"{source.label}: {saved.which}")
    state = read_checkpoint(path)
    source = source._replace(path=str(path))
    return source._replace(state=state) if saved.kind == IMAGES else source
