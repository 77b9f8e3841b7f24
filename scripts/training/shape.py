"""The model that the options describe: what tells it from others, and what of it cannot be built."""

from typing import Any, Dict

from fairseq_rskip.errors import UserError
from training.lengths import POSITIONS

SIDES = ("encoder", "decoder")
OPTIONS = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads", "normalize_before", "learned_pos")


def find_shape(args, defaults: Dict[str, Any]) -> Dict[str, Any]:
    """Layers, dimensions, heads and the like, by fairseq's names, as far as the architecture has them.

    ``args`` are fairseq's; the architecture's ``defaults`` hold where those are silent. The decoder's dimensions follow
    the encoder's.
    """
    shape = {}
    for side in SIDES:
        for option in OPTIONS:
            value = getattr(args, f"{side}_{option}", None)
            value = defaults.get(f"{side}_{option}") if value is None else value
            value = shape.get(f"encoder_{option}") if value is None else value
            if value is not None:
                shape[f"{side}_{option}"] = value
    return shape


def find_positions(args, defaults: Dict[str, Any], given: Dict[str, Any]):
    """The most tokens of a source and of a target sentence: of the task's limit and the model's the lower."""
    limits = []
    for name in ("max_source_positions", "max_target_positions"):
        both = [value for value in (getattr(args, name, None), defaults.get(name)) if value]
        limits.append(given.get(name) or min(both, default=POSITIONS))
    return tuple(limits)


def check_model(arch: str, config: Any, given: Dict[str, Any], shape: Dict[str, Any]) -> None:
    """Raises ``UserError`` for skip options that contradict each other, and for heads that do not divide a dimension.

    ``config`` is the architecture's dataclass with its defaults, or None.
    """
    for side in SIDES:
        dim, heads = shape.get(f"{side}_embed_dim"), shape.get(f"{side}_attention_heads")
        if isinstance(dim, int) and isinstance(heads, int) and (heads < 1 or dim % heads):
            raise UserError(f"--{side}-attention-heads {heads} does not divide --{side}-embed-dim {dim}")
    if not hasattr(config, "skip_kind"):
        return
    from fairseq_rskip.modules.skip_config import SkipConfig

    if isinstance(config, SkipConfig):
        for name in vars(config):
            setattr(config, name, given.get(name, getattr(config, name)))
        config.check(arch, pre_norm=any(shape.get(f"{side}_normalize_before") for side in SIDES))
