"""Your own text in a YAML file, or a published corpus with options: how and where it is prepared.

The folder is named after the text's content and options. A copied or renamed YAML file therefore
finds the same prepared text, and other text or options get another folder.
"""

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

from fairseq_rskip.console import to_argv
from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.corpus import DATA, NAMES, SPLITS
from fairseq_rskip.tools.prepare.text import content_hash

from .records import Table, dashed

Text = Table.Pairs | Table.Documents | Table.Published


def beside(text: Text, file: Path) -> Text:
    """``text`` as the YAML ``file`` describes it: its paths count from that file's folder."""

    def absolute(name: str) -> str:
        return str(file.parent.absolute() / Path(name).expanduser())

    if isinstance(text, Table.Documents):
        return text.model_copy(update={"text": absolute(text.text)})
    if isinstance(text, Table.Pairs):
        found = {split: [absolute(name) for name in getattr(text, split)] for split in SPLITS}
        return text.model_copy(update=found)
    return text


def files(text: Text) -> dict[str, Path]:
    """The text's files by their option of ``rskip prepare``; {} for a published corpus."""
    names = {}
    if isinstance(text, Table.Documents):
        names["text"] = text.text
    if isinstance(text, Table.Pairs):
        for split in SPLITS:
            source, target = getattr(text, split)
            names[f"{split}-src"] = source
            names[f"{split}-tgt"] = target
    return {option: Path(name) for option, name in names.items()}


def option_words(text: Text) -> list[str]:
    """The options of ``rskip prepare`` that are not files."""
    words = to_argv(dashed(text.options))
    if not isinstance(text, Table.Pairs):
        return words
    return ["--src", text.source, "--tgt", text.target, *words]


def identity(text: Text) -> dict[str, str]:
    """What the prepared text depends on: options, and checksums by option.

    Raises ``UserError`` for missing files.
    """
    paths = files(text)
    if isinstance(text, Table.Pairs):
        missing = [str(path) for path in paths.values() if not path.is_file()]
        if missing:
            verb = "does" if len(missing) == 1 else "do"
            raise UserError(f"{', '.join(missing)} {verb} not exist; expected text files")
    checksums = {option: content_hash(path) for option, path in paths.items()}
    return {"options": shlex.join(option_words(text)), **checksums}


def folder(text: Text) -> Path:
    """Where the text is prepared: in its ``folder``, else in ./data.

    Raises ``UserError`` for missing files.
    """
    if text.folder:
        return Path(text.folder).expanduser().resolve()
    content = json.dumps(identity(text), sort_keys=True).encode()
    checksum = hashlib.sha256(content).hexdigest()[:8]
    return (DATA / f"{_base_name(text)}-{checksum}").absolute()


def check_options(text: Text, out: str) -> None:
    """Raise ``UserError`` for options that ``rskip prepare`` refuses.

    Where a file is missing, because the text has been prepared elsewhere, they are not read.
    """
    from fairseq_rskip.tools.prepare.main import parse

    if not all(path.exists() for path in files(text).values()):
        return
    try:
        parse(prepare_words(text, out)[1:])
    except UserError as error:
        raise UserError(f"the options of the text: {error}") from None


def facts(text: Table.Published, out: str) -> dict[str, Any]:
    """What preparation.json says of the choices, where ``text`` is prepared in ``out``."""
    from fairseq_rskip.tools.prepare.main import parse, plan

    return plan(*parse(prepare_words(text, out)[1:])).facts


def _base_name(text: Text) -> str:
    """The folder's name without its checksum. Raises ``UserError`` for an unknown corpus."""
    if isinstance(text, Table.Published):
        if text.corpus not in NAMES:
            raise UserError(f"no corpus named {text.corpus!r}; the corpora are {', '.join(NAMES)}")
        return text.corpus

    first = next(iter(files(text).values()))
    languages = [text.source, text.target] if isinstance(text, Table.Pairs) else []
    return "-".join([first.stem, *languages])


def prepare_words(text: Text, out: str) -> list[str]:
    """The words of ``rskip prepare`` that prepare the text in ``out``."""
    words = ["prepare"]
    if isinstance(text, Table.Published):
        words.append(text.corpus)
    words += option_words(text)
    for option, path in files(text).items():
        words += [f"--{option}", str(path)]
    return [*words, out]
