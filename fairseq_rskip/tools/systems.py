"""The systems of ``rskip compare``: files of translations, folders of evaluations, or checkpoints to evaluate."""

import contextlib
import json
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import cached
from fairseq_rskip.tools.lines import check_lengths, read_lines

SCORES, RECORD = "scores.json", "run.json"  # of rskip evaluate, of a run of rskip run


class Output(NamedTuple):
    """A system's translations and, of an evaluation, the files of its references and its source."""

    lines: list[str]
    references: list[Path] = []
    source: Path | None = None


def name_paths(words: list[str]) -> dict[str, Path]:
    """Each system's path by its name: NAME of ``NAME=PATH``, else the label in the run's record, else the end of its
    path. Raises ``UserError`` for a path that does not exist or a system that is given twice."""
    given = [("", word) if Path(word).exists() else word.partition("=")[::2] for word in words]
    names, paths = [name for name, path in given], [Path(path or name) for name, path in given]
    missing = next((path for path in paths if not path.exists()), None)
    if missing:
        raise UserError(f"no file or folder {missing}")
    common = os.path.commonpath([path.absolute().parent for path in paths])
    ends = [os.path.relpath(path.absolute(), common) for path in paths]
    names = [name or recorded_label(path) or end for name, path, end in zip(names, paths, ends)]
    names = [name if names.count(name) == 1 else f"{name} ({end})" for name, end in zip(names, ends)]
    if len(set(names)) < len(names) or len({path.resolve() for path in paths}) < len(paths):
        raise UserError("a system is given twice")
    return dict(zip(names, paths))


def recorded_label(path: Path) -> str:
    """The label of the row in the record of the run that ``path`` belongs to; "" without one."""
    for folder in (path, *path.absolute().parents[:2]):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return str(json.loads((folder / RECORD).read_text("utf-8")).get("label") or "")
    return ""


def read_scores(folder: Path) -> dict[str, Any]:
    """The content of the scores.json that ``rskip evaluate`` wrote to ``folder``. Raises ``UserError``."""
    try:
        return {"ref": [], **json.loads((folder / SCORES).read_text("utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        accepted = "expected a file of translations, checkpoints, a folder of rskip evaluate, or RUN/seed1 of rskip run"
        raise UserError(f"{folder} has no readable {SCORES} ({error}): {accepted}") from None


def evaluations_of(checkpoint: Path) -> Iterator[dict[str, Any]]:
    """The scores beside ``checkpoint``, or beside its folder, of exactly its weights. Raises as ``read_scores``."""
    parents = (checkpoint.parent, checkpoint.parent.parent)  # of a run of rskip run: beside checkpoints/
    near = [parents[0], *(folder for parent in parents for folder in sorted(parent.glob("evaluation*")))]
    for folder in near:
        if (folder / SCORES).is_file():
            scores = read_scores(folder)
            scored = scores.get("evaluation", {}).get("checkpoints")
            if scored == cached.identity([checkpoint]) or cached.is_made(checkpoint, {"checkpoints": scored}):
                yield scores


def evaluation(path: Path, data: Path | None, output: Path | None) -> Path:
    """The file of translations or the folder of an evaluation that ``path`` is; checkpoints are evaluated on ``data``,
    into ``output``. Raises ``UserError``."""
    if (path / "checkpoints").is_dir():  # a seed's folder of rskip run
        path = path / ("evaluation" if (path / "evaluation" / SCORES).is_file() else "checkpoints")
    if zipfile.is_zipfile(path) or (any(path.glob("checkpoint*.pt")) and not (path / SCORES).is_file()):
        with contextlib.redirect_stdout(sys.stderr):
            from fairseq_rskip.tools.evaluate.main import evaluated  # takes seconds

            path = evaluated(path, data, output)
    return path


def read_system(path: Path) -> Output:
    """The translations in ``path``, a file or the folder of an evaluation. Raises ``UserError``."""
    if not path.is_dir():
        return Output(read_lines(path))
    report = read_scores(path)
    references = [Path(reference) for reference in report["ref"]]
    words = report.get("evaluation", {}).get("options", [])
    language = dict(zip(words, words[1:])).get("--source-lang")
    # data preparation puts source and target side by side
    source = references[0].with_suffix(f".{language}") if language and references else None
    return Output(read_lines(path / "hyp.txt"), references, source if source and source.is_file() else None)


def load(
    paths: dict[str, Path], ref: list[Path] | None, src: Path | None
) -> tuple[list[list[str]], list[list[str]], list[str]]:
    """Each system's translations, each reference, and the source, which is empty if it is not known.

    Raises ``UserError`` if they are not of the same test set.
    """
    outputs = {path: read_system(path) for path in paths.values()}
    named = ref or next((output.references for output in outputs.values() if output.references), None)
    if not named:
        raise UserError("plain files need their reference: --ref FILE")
    references = {path: read_lines(path) for path in named}
    for path, output in outputs.items():
        if not ref and output.references and [*map(read_lines, output.references)] != [*references.values()]:
            raise UserError(f"{path} and {next(iter(outputs))} were scored against different references")
        check_lengths(output.lines, references, path)
    src = src or next((output.source for output in outputs.values() if output.source), None)
    source = read_lines(src) if src else []
    if source:
        check_lengths(source, references, src)
    return [output.lines for output in outputs.values()], [*references.values()], source
