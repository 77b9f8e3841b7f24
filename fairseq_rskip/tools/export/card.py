"""The card of an exported model."""

import inspect
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from fairseq_rskip.files import write_text
from fairseq_rskip.residual import own_rules, skips
from fairseq_rskip.version import __version__

CARD = """---
{header}---

# {title}

{parameters:,} parameters. Licence of the weights: {licence}.

```python
{loading}{example}
```
{note}
Skip connections, of the block's input x, its branch F and a norm G:

{rules}

Scores:{scores}

training.json has the training's settings. Exported with fairseq_rskip {version}, torch {torch}.
"""

LOADING = """\
# in a checkout of fairseq_rskip: scripts/setup_env.sh, or
# pip install {packages}
import fairseq_rskip

model = fairseq_rskip.from_pretrained("DIR")  # this folder
"""
LOADING_TEXT = LOADING.format(
    packages="""\"$(python -m fairseq_rskip.tools.build_fairseq)\" '.[fairseq]'"""
)
LOADING_IMAGES = LOADING.format(packages="'.[vision]'")


def _own_rules(model: Any) -> str:
    """The lines of Python that name the files of rules that are not of this package."""
    files = [own_rules.file_of(skip.kind) for skip in skips(model).values()]
    names = sorted({f"DIR/{file.name}" for file in files if file is not None})
    if not names:
        return ""
    return (
        "# its rule is in this folder; read the file before you run it\n"
        "import os\n\n"
        f'os.environ["{own_rules.VARIABLE}"] = "{os.pathsep.join(names)}"\n\n'
    )


def escape(value: Any) -> str:
    """``value`` as one line of plain text in Markdown: neither HTML nor Markdown in it has an
    effect, but for a bare address, which some readers make a link.
    """
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;")
    # not an underscore inside a word, which has no effect and is in most names
    return re.sub(r"([\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_])|^[#>+-])", r"\\\1", text)


@dataclass(frozen=True)
class Card:
    """What the card says of one model.

    ``header`` is as Hugging Face reads it, ``loading`` and ``example`` are Python, and ``note`` is
    a paragraph.
    """

    header: dict[str, Any]
    title: str
    scores: list[str]
    example: str
    loading: str = LOADING_TEXT
    note: str = ""


def write(path: Path, card: Card, model: Any, licence: str) -> None:
    """Write the card, with the rules of ``model`` and their files."""
    by_kind: dict[str, list[Any]] = {}
    for skip in skips(model).values():
        by_kind.setdefault(skip.kind, []).append(skip)
    header = {"license": licence, **card.header, "tags": ["fairseq_rskip", *by_kind]}
    rules = "\n".join(rule_line(blocks) for blocks in by_kind.values())
    score_list = "".join(f"\n* {escape(line)}" for line in card.scores)
    text = CARD.format(
        header=yaml.safe_dump(header, sort_keys=False),
        title=escape(card.title),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        licence=escape(licence),
        loading=_own_rules(model) + card.loading,
        example=card.example,
        note=f"\n{card.note}\n" if card.note else "",
        rules=rules,
        scores=score_list or " none are known.",
        version=__version__,
        torch=torch.__version__,
    )
    write_text(path, text)


def rule_line(blocks: list[Any]) -> str:
    """A line of the card for the blocks of a kind: its name, constants, options, first paragraph.

    A constant that differs between the blocks has its least and its largest value.
    """
    values: dict[str, list[float]] = {}
    for skip in blocks:
        for name, value in skip.constants().items():
            values.setdefault(name, []).append(value)
    numbers = [f"{name} {_span(each)}" for name, each in values.items()]
    numbers += [f"{name} {value}" for name, value in blocks[0].choices().items()]
    constants = f" ({', '.join(numbers)})" if numbers else ""
    first_paragraph = (inspect.getdoc(type(blocks[0])) or "").split("\n\n")[0]
    rule = " ".join(first_paragraph.replace("``", "`").split())
    return f"* `{blocks[0].kind}`{constants}: {rule}"


def _span(values: list[float]) -> str:
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low} to {high}"
