"""What the cards of Transformers and of ResNets share: the header, usage, skip connections; and the weights' file."""

import dataclasses
import inspect
import shutil
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import torch
import yaml

import fairseq_rskip
from fairseq_rskip.pretrained import CONFIG, WEIGHTS
from fairseq_rskip.residual import SkipConnection
from fairseq_rskip.tools.process import git_commit

SENTENCE = "A sentence as it is written."


def save_weights(model: Any, stage: Path) -> None:
    """Write ``model``'s weights and buffers; tensors that are shared are stored once."""
    from safetensors.torch import save_model

    save_model(model, str(stage / WEIGHTS), metadata={"format": "pt"})
    shutil.copymode(stage / CONFIG, stage / WEIGHTS)  # others may read it, too


def page(header: Dict[str, Any], title: str, parts: Sequence[str]) -> str:
    """A card: a YAML header as Hugging Face reads it, a title, and ``parts``, of which empty ones are left out."""
    top = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    commit = git_commit()
    made = f"Exported with fairseq_rskip {fairseq_rskip.__version__}" + (f", commit {commit}" if commit else "")
    body = "\n\n".join(part for part in [f"# {title}", *parts, f"{made}, torch {torch.__version__}."] if part)
    return f"---\n{top}---\n\n{body}\n"


def model_index(name: str, task: str, data: Dict[str, str], values: Sequence[Tuple[str, str, float]]) -> Dict[str, Any]:
    """Hugging Face's ``model-index`` for results ``(name, type, value)``; nothing without results."""
    if not values:
        return {}
    metrics = [{"name": label, "type": kind, "value": round(value, 4)} for label, kind, value in values]
    return {"model-index": [{"name": name, "results": [{"task": {"type": task}, "dataset": data, "metrics": metrics}]}]}


def usage(lines: str, entry: str) -> str:
    """How the model is loaded; ``entry`` is hubconf.py's."""
    hub = f'torch.hub.load(REPOSITORY, "{entry}", "DIR", source="local")'
    return f"## Use\n\n```python\nimport fairseq_rskip\n\n{lines}\n```\n\nor `{hub}`. DIR is this folder."


def size(model: Any) -> str:
    """The number of parameters, each counted once, in words."""
    return f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"


def skips(model: Any) -> str:
    """The rule of each kind of skip connection in ``model``, with its equation, source and options."""
    found: Dict[Tuple[str, str], List[SkipConnection]] = {}
    for module in model.modules():
        if isinstance(module, SkipConnection):
            found.setdefault((module.kind, str(module.options)), []).append(module)
    lines = ["## Skip connections\n\nx is the block's input, F its weighted branch, G the normalisation.\n"]
    for (kind, _), same in found.items():
        rule = " ".join(inspect.getdoc(type(same[0])).split("\n\n")[0].split()).replace("``", "`")
        options = dataclasses.asdict(same[0].options).items()
        shown = ", ".join(f"{name} {value}" for name, value in options if value is not None)
        parameters = sum(p.numel() for p in {p for skip in same for p in skip.parameters()})
        lines.append(f"* {len(same)} of the kind `{kind}` ({shown}), with {parameters:,} parameters: {rule}")
    return "\n".join(lines)
