"""Convert a layer's part of a checkpoint of stock fairseq to this package's names."""

from typing import Any

from torch import Tensor, nn

from fairseq_rskip.errors import UserError
from fairseq_rskip.residual import SkipConnection
from fairseq_rskip.residual.state import SAVED_AS, WithRule, check_file

# never-trained duplicates that fairseq's encoder layer registers for its fused inference path
_STOCK_DUPLICATES = [
    f"{name}_{part}"
    for name in ("in_proj", "out_proj", "fc1", "fc2")
    for part in ("weight", "bias")
]


def upgrade_layer(state_dict: dict[str, Tensor], name: str, children: dict[str, nn.Module]) -> bool:
    """Rename a stock fairseq layer's normalisations to ours and drop its duplicates, in place.

    ``….final_layer_norm.weight`` is ``….final_skip.post.0.weight`` here (``.pre.`` before the
    branch). Returns whether there was one of stock's names.

    ``children`` are those of the layer ``name``. Raises ``UserError`` where it was trained with
    another rule.
    """
    is_stock = False
    for duplicate in _STOCK_DUPLICATES:
        state_dict.pop(f"{name}.{duplicate}", None)
    for child, skip in children.items():
        if isinstance(skip, SkipConnection):
            place = f"{name}.{child}"
            ours = "post.0" if skip.pre is None else "pre"
            for part in ("weight", "bias"):
                stock = f"{place[: -len('_skip')]}_layer_norm.{part}"
                if stock in state_dict:
                    is_stock = True
                    state_dict[f"{place}.{ours}.{part}"] = state_dict.pop(stock)
            skip.upgrade(state_dict, f"{place}.", _noted(state_dict, place).get("skip"))
            check_rule(state_dict, place, skip)
            _check_lambda(state_dict, place, len(skip.post))
    return is_stock


def check_rule(state_dict: dict[str, Tensor], name: str, module: WithRule) -> None:
    """Raise ``UserError`` where the checkpoint has another rule for ``module``, called ``name``."""
    noted = _noted(state_dict, name)
    check_file(noted)
    difference = module.mismatch(noted.get("skip"))
    if difference:
        raise UserError(f"{name or 'the model'} {SAVED_AS} {difference}")


def _noted(state_dict: dict[str, Tensor], name: str) -> dict[str, Any]:
    """What a state dict's metadata has of the module ``name``."""
    return getattr(state_dict, "_metadata", {}).get(name, {})


def _check_lambda(state_dict: dict[str, Tensor], place: str, built: int) -> None:
    """Raise ``UserError`` where checkpoint and model have different numbers of normalisations."""
    saved = sum(key.startswith(f"{place}.post.") and key.endswith(".weight") for key in state_dict)
    if saved and built and saved != built:
        raise UserError(
            f"{place} has {saved} normalisations in the checkpoint and {built} in the model: "
            f"train or generate with the checkpoint's --skip-lambda ({saved} for rskip)"
        )
