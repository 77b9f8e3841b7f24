"""The systems of ``rskip compare``: files of translations, evaluations, checkpoints to evaluate."""

import contextlib
import os
import sys
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_rskip.console import label_and_path
from fairseq_rskip.errors import UserError
from fairseq_rskip.pretrained import WEIGHTS, check_is_not_bundled
from fairseq_rskip.tools import cached
from fairseq_rskip.tools.corpus import corpus_of
from fairseq_rskip.tools.evaluate.scores_file import SCORES, TRANSLATION, read_scores
from fairseq_rskip.tools.experiments.run_folder import (
    EVALUATION,
    check_no_seeds,
    read_record,
)
from fairseq_rskip.tools.lines import check_lengths, read_lines
from fairseq_rskip.tools.training_files import CHECKPOINTS

IMAGE_LOG = "log.jsonl"  # of rskip train-cifar


def name_paths(words: list[str]) -> dict[str, Path]:
    """Each system's path by its name.

    The name is NAME of ``NAME=PATH``, else the label in the run's record, else the end of the path.
    Raises ``UserError`` for a path that does not exist, one that is given twice, or two of a name.
    """
    names, paths = [], []
    for word in words:
        name, path_text = label_and_path(word)
        path = Path(path_text)
        if not path.exists():
            check_is_not_bundled(path)
            raise UserError(
                f"{path} does not exist; expected a file of translations, an evaluation, a "
                "checkpoint, or a folder of checkpoints"
            )
        names.append(recorded_label(path) if path_text == word else name)
        paths.append(path)

    common = os.path.commonpath([path.absolute().parent for path in paths])
    ends = [os.path.relpath(path.absolute(), common) for path in paths]
    names = [name or end for name, end in zip(names, ends)]
    unique = []
    for name, end in zip(names, ends):
        unique.append(name if names.count(name) == 1 else f"{name} ({end})")

    listed = " and ".join(map(str, paths))
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError(f"a system is given twice ({listed}): expected different ones")
    if len(set(unique)) < len(unique):
        raise UserError(f"two systems have one name ({listed}): expected NAME=PATH for each")
    return dict(zip(unique, paths))


def recorded_label(path: Path) -> str:
    """The label of the row in the record of the run that ``path`` belongs to; "" without one."""
    for folder in (path, *path.absolute().parents[:2]):
        record = read_record(folder)
        if "settings" in record:
            return record["settings"].get("label", "")
    return ""


def evaluations_of(checkpoint: Path) -> Iterator[dict[str, Any]]:
    """The scores beside ``checkpoint``, or beside its folder, of exactly its weights.

    A model with rules in files of your own was evaluated with these files as they are now. Raises
    as ``read_scores``.
    """
    from fairseq_rskip.tools.evaluate import weights  # takes seconds

    rules = weights.own_rules_of(checkpoint)
    beside = checkpoint.parent
    beside_checkpoints = beside.parent  # where rskip run evaluates
    folders = [beside]
    for parent in (beside, beside_checkpoints):
        folders += sorted(parent.glob("evaluation*"))

    for folder in folders:
        if (folder / SCORES).is_file():
            scores = read_scores(folder)
            if scores["evaluation"].get("rules", []) != rules:
                continue
            scored = scores["evaluation"].get("checkpoints")
            same_file = scored == cached.identity([checkpoint])
            if same_file or cached.is_made(checkpoint, {"checkpoints": scored}):
                yield scores


class System(NamedTuple):
    """A file of translations, or the folder of an evaluation that may still have to be made."""

    path: Path
    text_sha256: str | None = None  # of the text that a language model scores; None: translations
    options: Namespace | None = None  # of rskip evaluate, where it still has to be made

    def evaluated(self) -> Path:
        """``path``, evaluated if it was not. Raises ``UserError``."""
        if self.options is not None:
            from fairseq_rskip.tools.evaluate import main  # takes seconds

            with contextlib.redirect_stdout(sys.stderr):
                main.evaluate(self.options)
        return self.path


def find_system(path: Path, data: Path | None) -> System:
    """The system in ``path``; nothing is translated yet.

    A checkpoint, or the average of a training's folder, is to be evaluated with default options on
    ``data`` (default: its training data), beside it. Raises ``UserError``.
    """
    if (path / CHECKPOINTS).is_dir():
        path = path / CHECKPOINTS if data else _scored_or_checkpoints(path)

    _check_is_not_of_images(path)
    check_no_seeds(path)
    if (path / WEIGHTS).is_file():
        raise UserError(f"{path} is an export; expected the checkpoints that it was made from")
    has_checkpoints = any(path.glob("checkpoint*.pt")) and not (path / SCORES).is_file()
    if path.suffix == ".pt" or zipfile.is_zipfile(path) or has_checkpoints:
        return _to_evaluate(path, data)
    if data:
        raise UserError(f"--data is for checkpoints, and {path} is evaluated already")
    text_sha256 = read_scores(path).get("text_sha256") if path.is_dir() else None
    return System(path, text_sha256)


def _scored_or_checkpoints(folder: Path) -> Path:
    """The evaluation in a seed's folder of rskip run, or its checkpoints without one.

    Raises ``UserError`` for several.
    """
    scored = sorted(each.parent for each in folder.glob(f"{EVALUATION}*/{SCORES}"))
    if len(scored) > 1:
        listed = ", ".join(each.name for each in scored)
        raise UserError(f"{folder} has several evaluations: expected one of {listed} in it")
    return scored[0] if scored else folder / CHECKPOINTS


def _check_is_not_of_images(path: Path) -> None:
    """Raise ``UserError`` for a training of images: its folder, that of its seeds, a checkpoint."""
    folder = path if path.is_dir() else path.parent
    if (folder / IMAGE_LOG).is_file() or any(folder.glob(f"seed*/{IMAGE_LOG}")):
        raise UserError(
            f"{path} is of rskip train-cifar, and rskip compare takes translations and language "
            "models: for images, the report of rskip run compares rows over seeds"
        )


def _to_evaluate(path: Path, data: Path | None) -> System:
    """A checkpoint, or a folder of checkpoints, to evaluate. Raises ``UserError``."""
    from fairseq_rskip.tools.evaluate import main, weights  # takes seconds

    checkpoints = [path]
    if path.is_dir():
        checkpoints, _ = weights.choose(path, 1)
    task = weights.task_of(checkpoints[0])
    corpus = corpus_of(checkpoints[0], str(data or task.get("data")), data)
    is_language_model = task.get("_name") == "language_modeling"
    if is_language_model != corpus.is_monolingual:
        kind = "language" if is_language_model else "translation"
        languages = "one language" if corpus.is_monolingual else "two languages"
        raise UserError(f"{path} is a {kind} model, and {corpus.folder} has {languages}")
    corpus.check_vocabulary(checkpoints[0].parent, "name the corpus that it was trained on")

    options = main.default_options(corpus.folder, path)
    text_sha256 = corpus.text_sha256(options.subset) if corpus.is_monolingual else None
    return System(options.out, text_sha256, options)


def are_texts(systems: dict[str, System]) -> bool:
    """Whether they are language models.

    Raises ``UserError`` if only some are, or if they do not score the same text.
    """
    texts = [name for name, system in systems.items() if system.text_sha256]
    others = [name for name in systems if name not in texts]
    if texts and others:
        raise UserError(
            f"{texts[0]} is a language model and {others[0]} is not; expected systems of one kind"
        )
    for name in texts[1:]:
        if systems[name].text_sha256 != systems[texts[0]].text_sha256:
            raise UserError(f"{texts[0]} and {name} do not score the same text")
    return bool(texts)


def read_system(path: Path) -> tuple[list[str], list[Path]]:
    """The translations in ``path``, a file or the folder of an evaluation, and its references.

    The references are files; a file of translations has none. Raises ``UserError``.
    """
    if path.is_dir():
        references = [Path(name) for name in read_scores(path)["ref"]]
        return read_lines(path / TRANSLATION), references
    return read_lines(path), []


def load(paths: dict[str, Path], ref: list[Path] | None) -> tuple[list[list[str]], list[list[str]]]:
    """Each system's translations, and each reference.

    Raises ``UserError`` if they are not of the same test set.
    """
    systems = {path: read_system(path) for path in paths.values()}
    named = ref or next((own for _, own in systems.values() if own), None)
    if not named:
        raise UserError("plain files need their reference: --ref FILE")
    references = {path: read_lines(path) for path in named}
    for path, (lines, own) in systems.items():
        if own and not ref and [*map(read_lines, own)] != [*references.values()]:
            raise UserError(
                f"{path} and {next(iter(systems))} were scored against different references"
            )
        check_lengths(lines, references, path)
    return [lines for lines, _ in systems.values()], [*references.values()]
