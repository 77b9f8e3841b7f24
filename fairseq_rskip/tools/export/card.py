"""The card of an exported model: card.md.j2 with every value escaped."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import jinja2
import torch
import yaml
from markupsafe import Markup

import fairseq_rskip
from fairseq_rskip.files import write_text
from fairseq_rskip.residual import skips
from fairseq_rskip.tools import description
from fairseq_rskip.tools.process import git_commit


def escape(value: Any) -> str:
    """``value`` as one line of plain text in Markdown: neither HTML nor Markdown in it has an effect."""
    if isinstance(value, Markup):  # |safe in the template
        return value
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*\[\]|])", r"\\\1", text)


def write(path: Path, model: Any, licence: str, header: dict[str, Any], **parts: Any) -> None:
    """Write the card: a header as Hugging Face reads it, then what card.md.j2 makes of ``parts``.

    ``parts`` are title, task, text, settings, ``results`` (name, type and value of each score) on ``data``, and
    ``scored``, what they are the scores of.
    """
    rules = {skip.kind: inspect.getdoc(type(skip)).split("\n\n")[0] for skip in skips(model).values()}
    header = {"license": licence, **header, "pipeline_tag": parts["task"], "tags": ["fairseq_rskip", *rules]}
    if metrics := [{"name": n, "type": t, "value": round(v, 4)} for n, t, v in parts["results"]]:
        result = {"task": {"type": parts["task"]}, "dataset": parts["data"], "metrics": metrics}
        header["model-index"] = [{"name": parts["title"], "results": [result]}]
    table = "\n".join([*description.table(description.describe_skips(model)), description.COLUMNS])
    parts |= {"skips": table, "licence": licence, "parameters": f"{sum(p.numel() for p in model.parameters()):,}"}
    parts |= {"rules": {kind: " ".join(rule.split()).replace("``", "`") for kind, rule in rules.items()}}
    parts |= {"version": fairseq_rskip.__version__, "commit": git_commit(), "torch": torch.__version__}
    parts |= {"header": yaml.safe_dump(header, sort_keys=False), "settings": json.dumps(parts["settings"], indent=1)}
    layout = Path(__file__).with_name("card.md.j2").read_text("utf-8")
    template = jinja2.Template(layout, trim_blocks=True, keep_trailing_newline=True, finalize=escape)
    write_text(path, template.render(**parts))
