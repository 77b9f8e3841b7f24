"""A SYSTEM of ``rskip compare``: a file of translations, an evaluation's folder, or checkpoints to evaluate."""

import contextlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.lines import check_lengths, read_lines

MAGIC = (b"PK\3\4", b"\x80")  # of torch's files: a zip archive, before torch 1.6 a pickle


def names_of(paths: list[Path]) -> list[str]:
    """What tells the paths apart: each without the beginning and the end that all share.

    Raises ``UserError`` for one that is not there or is given twice, before anything is evaluated.
    """
    for path in paths:
        if not path.exists():
            raise UserError(f"no file or folder {path}")
    parts = [path.absolute().parts for path in paths]
    if len(set(parts)) < len(parts):
        raise UserError("a system is given twice")
    while all(len(each) > 1 for each in parts) and len({each[0] for each in parts}) == 1:
        parts = [each[1:] for each in parts]
    while all(len(each) > 1 for each in parts) and len({each[-1] for each in parts}) == 1:
        parts = [each[:-1] for each in parts]
    return ["/".join(each) for each in parts]


def has_weights(path: Path) -> bool:
    """Whether ``path`` is a checkpoint, or a folder of some that is no evaluation's."""
    if path.is_dir():
        return not (path / "scores.json").is_file() and any(path.glob("checkpoint*.pt"))
    with open(path, "rb") as file:  # not by its name: a.pt may be Portuguese
        return file.read(4).startswith(MAGIC)


def evaluation_of(path: Path, name: str, data: Path | None, output: Path | None) -> Path:
    """``path``, or the folder with an evaluation of the checkpoints that it is, on ``data``, below ``output``.

    What the evaluation prints goes to stderr. Raises ``UserError``.
    """
    if not has_weights(path):
        return path
    with contextlib.redirect_stdout(sys.stderr):
        from fairseq_rskip.tools.evaluate.scored import evaluated  # takes seconds

        return evaluated(path, data, output / name.replace("/", "-") if output else None)


class Output(NamedTuple):
    """A system's translations; references and source are known of an evaluation's folder, whose source may be gone."""

    lines: list[str]
    references: list[Path] | None = None
    source: Path | None = None


def read_system(path: Path) -> Output:
    """What ``path``, a file or an evaluation's folder, holds. Raises ``UserError``."""
    if not path.is_dir():
        return Output(read_lines(path))
    try:
        report = json.loads((path / "scores.json").read_text("utf-8"))
        references = [Path(reference) for reference in report["ref"]]
        words = report.get("evaluation", {}).get("options", [])
    except OSError as error:
        cause = f"no folder of evaluate.sh, cannot read its scores.json: {error.strerror}"
        raise UserError(f"{path} is {cause}; of rskip run it is RUN/seedN/evaluation") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no folder of evaluate.sh: cannot read its scores.json ({error})") from None
    language = dict(zip(words, words[1:])).get("--source-lang")
    source = references[0].with_suffix(f".{language}") if language else None  # data preparation keeps them side by side
    return Output(read_lines(path / "hyp.txt"), references, source if source and source.is_file() else None)


def load(
    paths: list[Path], ref: list[Path] | None, src: Path | None
) -> tuple[list[list[str]], list[list[str]], list[str]]:
    """Each system's translations, each reference, and the source, empty where it is not known.

    Raises ``UserError`` where they are not of one test set.
    """
    found = [read_system(path) for path in paths]
    named = ref or next((output.references for output in found if output.references), None)
    if not named:
        raise UserError("plain files need their reference: --ref FILE")
    references = {path: read_lines(path) for path in named}
    for path, output in zip(paths, found):
        if output.references and not ref and [read_lines(each) for each in output.references] != [*references.values()]:
            raise UserError(f"{path} and {paths[0]} were scored against different references")
        check_lengths(output.lines, references, path)
    src = src or next((output.source for output in found if output.source), None)
    source = read_lines(src) if src else []
    if source:
        check_lengths(source, {paths[0]: found[0].lines}, src)
    return [output.lines for output in found], list(references.values()), source
