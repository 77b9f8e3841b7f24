"""The evaluation of given weights: an existing one beside them, or a new one as ``rskip evaluate`` makes it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import cached
from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.evaluate.arguments import parse
from fairseq_rskip.tools.evaluate.main import evaluate
from fairseq_rskip.tools.evaluate.weights import choose, identity, load_state, settings
from fairseq_rskip.tools.systems import SCORES, read_scores


def evaluated(path: Path, data: Path | None, out: Path | None) -> Path:
    """Evaluate a checkpoint, or a training's folder (its average), with default options, unless that is up to date.

    Returns the folder of the evaluation: one beside the checkpoint that is there already, else ``out``, else a new one
    beside it. ``data`` is by default what the checkpoint was trained on. Raises ``UserError``.
    """
    folder, checkpoint = (path, []) if path.is_dir() else (path.parent, ["--checkpoint", str(path)])
    options = parse(["DATA", str(folder), *checkpoint])
    taken, _ = choose(folder, options.average, options.checkpoint)
    trained_on = None if data else settings(load_state(taken[0]), "task").get("data")
    options.data = corpus_of(taken[0], trained_on, data).folder
    beside = options.out.with_name(f"{options.out.name}-{path.stem}") if checkpoint else options.out
    options.out = beside if (beside / SCORES).is_file() else out or beside
    evaluate(options)
    return options.out


def corpus_of(checkpoint: Path, trained_on: Any, data: Path | None) -> Corpus:
    """The prepared corpus ``data``, else the one that the checkpoint was ``trained_on``. Raises ``UserError``."""
    try:
        return Corpus.find(data or str(trained_on), prepared=True)
    except UserError as error:
        if data:
            raise
        raise UserError(f"{checkpoint} was trained on {trained_on}: {error}; name its folder with --data") from None


def evaluations_of(checkpoints: list[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folders beside the checkpoints, or beside their folder, with scores of exactly these weights or their average.

    Raises as ``read_scores``.
    """
    parents = (checkpoints[0].parent, checkpoints[0].parent.parent)  # of a run of rskip run: beside checkpoints/
    near = [parents[0], *(folder for parent in parents for folder in sorted(parent.glob("evaluation*")))]
    for folder in near:
        if (folder / SCORES).is_file():
            scores = read_scores(folder)
            scored = scores.get("evaluation", {}).get("checkpoints")
            is_average = len(checkpoints) == 1 and cached.is_made(checkpoints[0], {"checkpoints": scored})
            if is_average or scored == identity(checkpoints):
                yield folder, scores
