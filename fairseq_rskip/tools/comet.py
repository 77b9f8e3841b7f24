"""COMET scores, as the package unbabel-comet's own command ``comet-score`` gives them.

The command runs in a process of its own. It may therefore be in another environment, on PATH: the
package needs numpy 1 and protobuf 4, older versions than those of requirements.lock.
"""

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

from fairseq_rskip.console import Parser
from fairseq_rskip.errors import UserError
from fairseq_rskip.pretrained.text import detokenise
from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.lines import writing
from fairseq_rskip.tools.prepare.archives import checksum
from fairseq_rskip.tools.process import environment, follow

NAME = "COMET"
COMMAND = "comet-score"
INSTALL = (
    f"{NAME} needs the command {COMMAND} of the Python package unbabel-comet, beside this Python "
    "or on PATH: pipx install unbabel-comet, or pip install '.[fairseq,comet]' in an environment "
    "of its own"
)
HELP = "also score with COMET: the name of a model of unbabel-comet, or the path of a .ckpt"


def add_option(parser: Parser) -> None:
    """Add ``--comet``."""
    parser.add_argument("--comet", type=model_name, metavar="MODEL", help=HELP)


def model_name(word: str) -> str:
    """A type for argparse: a model as comet-score takes it, a name or an absolute path.

    A folder as COMET saves it (``checkpoints/model.ckpt`` beside ``hparams.yaml``) is accepted.
    """
    path = Path(word).expanduser()
    is_path = path.exists() or path.suffix == ".ckpt" or word.startswith(("/", ".", "~"))
    if not is_path:
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", word):
            return word
        raise argparse.ArgumentTypeError(
            f"{word!r} is no name of a model, such as Unbabel/wmt22-comet-da"
        )
    if path.is_dir():
        path = path / "checkpoints" / "model.ckpt"
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{path} does not exist")
    if path.suffix != ".ckpt" or not path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is not a checkpoint of COMET: expected *.ckpt")
    path = path.absolute()
    if not (path.parents[1] / "hparams.yaml").is_file():
        raise argparse.ArgumentTypeError(
            f"{path} is not a checkpoint of COMET: {path.parents[1]} has no hparams.yaml"
        )
    return str(path)


def program() -> Path:
    """The path of comet-score. Raises ``UserError`` if it is not installed."""
    located = shutil.which(COMMAND, path=environment()["PATH"])
    if not located:
        raise UserError(INSTALL)
    return Path(located)


class PlainTexts(NamedTuple):
    """What COMET reads, plain text, one line a sentence; ``about`` says how it was made."""

    sources: Sequence[str]
    outputs: Sequence[Sequence[str]]  # of each system
    references: Sequence[str]
    about: str


def segment_scores(model: str, texts: PlainTexts, gpu: bool) -> list[list[float]]:
    """The score of each sentence, for each system in ``texts.outputs``.

    ``model`` is as ``model_name`` returns it, ``gpu`` whether to use one. Raises ``UserError``
    where comet-score is not installed, or fails.
    """
    with tempfile.TemporaryDirectory(prefix="rskip-comet-") as temporary:
        folder = Path(temporary)
        names = [f"system{number}" for number in range(len(texts.outputs))]
        by_name = {"source": texts.sources, "reference": texts.references}
        by_name |= dict(zip(names, texts.outputs))
        for name, lines in by_name.items():
            with writing(folder / name) as file:
                # comet-score would end a line at a carriage return
                file.writelines(line.replace("\r", " ") + "\n" for line in lines)

        files = [str(folder / name) for name in names]
        result = folder / "scores.json"
        command = [str(program()), "--model", model, "--gpus", str(int(gpu))]
        command += ["-s", str(folder / "source"), "-r", str(folder / "reference"), "-t", *files]
        command += ["--quiet", "--only_system", "--to_json", str(result)]
        reason = follow(command, on_line=lambda line: None)
        if reason:
            raise UserError(f"{COMMAND} failed: {reason}")
        by_file = json.loads(result.read_text("utf-8"))
    return [[float(line[NAME]) for line in by_file[file]] for file in files]


def plain_texts(
    corpus: Corpus,
    subset: str,
    outputs: Sequence[list[str]],
    references: list[str],
) -> PlainTexts:
    """Source, translations and reference as COMET takes them.

    Text that is published as tokens is detokenised. Raises ``UserError`` without a raw source.
    """
    sources = corpus.sources(subset)
    if not corpus.tokenised:
        about = "source, detokenised translation and reference"
        return PlainTexts(sources, outputs, references, about)
    source, target = str(corpus.source), str(corpus.target)
    return PlainTexts(
        detokenise(sources, source),
        [detokenise(lines, target) for lines in outputs],
        detokenise(references, target),
        "source, translation and reference, each detokenised by sacremoses",
    )


def signature(model: str) -> str:
    """The model (of a file its name and checksum), and the version of unbabel-comet, where it can
    be found beside comet-score.
    """
    path = Path(model)
    if path.is_absolute():
        model = f"{path.name}|sha256:{checksum('sha256', path)[:12]}"
    folders = program().resolve().parent.parent.glob("lib/python*/site-packages")
    located = distributions(name="unbabel-comet", path=[str(folder) for folder in folders])
    versions = [f"unbabel-comet:{distribution.version}" for distribution in located]
    return "|".join([f"model:{model}", *versions])
