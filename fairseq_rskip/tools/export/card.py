"""The card of an exported model."""

import inspect
import re
from pathlib import Path
from typing import Any

import torch
import yaml

import fairseq_rskip
from fairseq_rskip.analysis.coefficients import constants
from fairseq_rskip.files import write_text
from fairseq_rskip.residual import skips

CARD = """---
{header}---

# {title}

{parameters:,} parameters. Licence of the weights: {licence}.

```python
# in a checkout of fairseq_rskip: scripts/setup_env.sh, or pip install . in an environment that has fairseq
import fairseq_rskip

model = fairseq_rskip.from_pretrained("DIR")  # this folder
{example}
```

Skip connections, of the block's input x, its branch F and a norm G:

{rules}

Scores:{scores}

training.json has the training's settings. Exported with fairseq_rskip {version}, torch {torch}.
"""


def escape(value: Any) -> str:
    """``value`` as one line of plain text in Markdown: neither HTML nor Markdown in it has an effect."""
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*\[\]|])", r"\\\1", text)


def write(path: Path, model: Any, licence: str, header: dict, scores: list[str], **about: str) -> None:
    """Write the card: a ``header`` as Hugging Face reads it, ``scores`` and a kind's title and example."""
    kinds = {skip.kind: skip for skip in skips(model).values()}
    header = {"license": licence, **header, "tags": ["fairseq_rskip", *kinds]}
    values: dict[str, Any] = {"title": escape(about["title"]), "licence": escape(licence), "example": about["example"]}
    values["header"] = yaml.safe_dump(header, sort_keys=False)
    rules = {kind: inspect.getdoc(type(skip)).split("\n\n")[0].replace("``", "`") for kind, skip in kinds.items()}
    numbers = {kind: ", ".join(f"{k} {v:.4g}" for k, v in constants(skip).items()) for kind, skip in kinds.items()}
    values["rules"] = "\n".join(f"* `{kind}` ({numbers[kind]}): {' '.join(rules[kind].split())}" for kind in rules)
    values["scores"] = "".join(f"\n* {escape(line)}" for line in scores) or " none are known."
    values["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    write_text(path, CARD.format(**values, version=fairseq_rskip.__version__, torch=torch.__version__))
