"""The evaluation of given weights: found beside them, or made as ``rskip evaluate`` makes it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import cached
from fairseq_rskip.tools.average import load_state
from fairseq_rskip.tools.evaluate.arguments import parse
from fairseq_rskip.tools.evaluate.checkpoints import choose, identity, settings
from fairseq_rskip.tools.evaluate.generation import search_options
from fairseq_rskip.tools.evaluate.main import data_identity, evaluate
from fairseq_rskip.tools.evaluate.prepared import Prepared, find

SCORES = "scores.json"


def evaluated(path: Path, data: Path | None, out: Path | None) -> Path:
    """The folder of the evaluation of a checkpoint, or of a training's folder (its average), with the default options.

    It is one that is there, else it is made in ``out``, or beside the checkpoint. ``data`` is by default what the
    checkpoint was trained on. Raises ``UserError``.
    """
    folder, weights = (path, []) if path.is_dir() else (path.parent, ["--checkpoint", str(path)])
    options = parse(["DATA", str(folder), *weights])
    taken, _ = choose(folder, options.average, options.checkpoint)
    prepared = find_corpus(taken[0], data or settings(load_state(taken[0]), "task").get("data"), data)
    search = search_options(prepared, options.subset, options.beam, options.lenpen, options.max_tokens)
    for made, scores in evaluations_of(taken):
        about = scores["evaluation"]
        same_search = [word for word in about["options"] if "=" not in word] == search
        if same_search and about["data"] == data_identity(prepared, options.subset):
            return made
    if weights:
        options.out = folder / f"{options.out.name}-{path.stem}"
    options.data, options.out = prepared.folder, out or options.out
    evaluate(options)
    return options.out


def find_corpus(checkpoint: Path, trained_on: Any, given: Path | None) -> Prepared:
    """The prepared corpus ``given``, else the one that the checkpoint was ``trained_on``. Raises ``UserError``."""
    try:
        return find(given or Path(str(trained_on)))
    except UserError as error:
        if given:
            raise
        raise UserError(f"{checkpoint} was trained on {trained_on}: {error}; say where it is with --data") from None


def read_scores(folder: Path) -> dict[str, Any]:
    """What ``rskip evaluate`` wrote to ``folder``. Raises ``UserError``."""
    path = folder / SCORES
    try:
        scores = json.loads(path.read_text("utf-8"))
        scores["evaluation"]["checkpoints"], scores["evaluation"]["options"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    return scores


def evaluations_of(checkpoints: list[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folders beside the checkpoints, or beside their folder, with scores of exactly these weights or their average.

    Raises as ``read_scores``.
    """
    parents = (checkpoints[0].parent, checkpoints[0].parent.parent)  # the second: of rskip run, beside checkpoints/
    near = [parents[0], *(folder for parent in parents for folder in sorted(parent.glob("evaluation*")))]
    for folder in near:
        if (folder / SCORES).is_file():
            scores = read_scores(folder)
            scored = scores["evaluation"]["checkpoints"]
            is_average = len(checkpoints) == 1 and cached.is_made(checkpoints[0], {"checkpoints": scored})
            if is_average or scored == identity(checkpoints):
                yield folder, scores
