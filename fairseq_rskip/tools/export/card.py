"""The card of an exported model, which card.md.j2 lays out, and the file of its weights."""

import dataclasses
import inspect
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import torch
import yaml

import fairseq_rskip
from fairseq_rskip.files import write_text
from fairseq_rskip.pretrained import CONFIG, WEIGHTS
from fairseq_rskip.residual import SkipConnection
from fairseq_rskip.tools.process import git_commit


def save_weights(model: Any, stage: Path) -> None:
    """Write ``model``'s weights and buffers; tensors that are shared are stored once."""
    from safetensors.torch import save_model

    save_model(model, str(stage / WEIGHTS), metadata={"format": "pt"})
    shutil.copymode(stage / CONFIG, stage / WEIGHTS)  # others may read it, too


def write(stage: Path, model: Any, header: dict[str, Any], **parts: Any) -> None:
    """Write README.md: ``header`` as Hugging Face reads it, then what card.md.j2 makes of ``parts``.

    They are title, text, use and entry (hubconf.py's), and, where there are any, error, scores, weights and commands.
    """
    layout = Path(__file__).with_name("card.md.j2").read_text("utf-8")
    template = jinja2.Template(layout, trim_blocks=True, keep_trailing_newline=True)
    made = {"version": fairseq_rskip.__version__, "commit": git_commit(), "torch": torch.__version__}
    top = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    write_text(stage / "README.md", template.render(header=top, skips=skips(model), **made, **parts))


def model_index(name: str, task: str, data: dict[str, str], values: Sequence[tuple[str, str, float]]) -> dict[str, Any]:
    """Hugging Face's ``model-index`` for results ``(name, type, value)``; nothing without results."""
    if not values:
        return {}
    metrics = [{"name": label, "type": kind, "value": round(value, 4)} for label, kind, value in values]
    return {"model-index": [{"name": name, "results": [{"task": {"type": task}, "dataset": data, "metrics": metrics}]}]}


def size(model: Any) -> str:
    """The number of parameters, each counted once, in words."""
    return f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"


def skips(model: Any) -> list[dict[str, Any]]:
    """Each kind of skip connection in ``model``: how many, options, parameters, its rule with equation and source."""
    found: dict[tuple[str, str], list[SkipConnection]] = {}
    for module in model.modules():
        if isinstance(module, SkipConnection):
            found.setdefault((module.kind, str(module.options)), []).append(module)
    lines = []
    for (kind, _), same in found.items():
        rule = " ".join(inspect.getdoc(type(same[0])).split("\n\n")[0].split()).replace("``", "`")
        options = dataclasses.asdict(same[0].options).items()
        shown = ", ".join(f"{name} {value}" for name, value in options if value is not None)
        parameters = sum(p.numel() for p in {p for skip in same for p in skip.parameters()})
        lines.append(dict(count=len(same), kind=kind, options=shown, parameters=f"{parameters:,}", rule=rule))
    return lines
