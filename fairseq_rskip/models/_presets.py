"""The one table of architectures: ``transformer_<variant><size>``, every variant in seven sizes."""

import copy
import re
from collections.abc import Iterator
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models.transformer.transformer_config import (
    DecoderConfig,
    EncDecBaseConfig,
    QuantNoiseConfig,
    TransformerConfig,
)

from fairseq_rskip.modules.fixnorm import FixNormConfig
from fairseq_rskip.modules.skip_config import SkipConfig
from fairseq_rskip.modules.skip_log import SkipLogConfig
from fairseq_rskip.residual import KINDS

# variant -> defaults of SkipConfig (docs/rules.md has the same rows)
VARIANTS: dict[str, dict[str, Any]] = {
    "postln": {"skip_kind": "xskip", "skip_norm": "layer", "skip_lambda": 1.0},
    "xskip": {"skip_kind": "xskip", "skip_norm": "none"},
    "xskip_ln": {"skip_kind": "xskip", "skip_norm": "layer"},
    "xskip_bn": {"skip_kind": "xskip", "skip_norm": "batch"},
    "rskip_ln": {"skip_kind": "rskip", "skip_norm": "layer"},
    "rskip_bn": {"skip_kind": "rskip", "skip_norm": "batch"},
    "askip_ln": {"skip_kind": "askip", "skip_norm": "layer"},
    "wskip": {"skip_kind": "wskip", "skip_norm": "none"},
    "wskip_ln": {"skip_kind": "wskip", "skip_norm": "layer"},
    # where the norm stands, and which
    "preln": {"skip_kind": "preln"},
    "periln": {"skip_kind": "periln"},
    "outln": {"skip_kind": "outln"},
    "lnscale": {"skip_kind": "lnscale"},
    "mixln": {"skip_kind": "mixln"},
    "scalenorm": {"skip_kind": "preln", "skip_norm": "scale", "fix_norm": True},
    "adanorm": {"skip_kind": "xskip", "skip_norm": "ada", "skip_lambda": 1.0},
    "rmsnorm": {"skip_kind": "preln", "skip_norm": "rms"},
    "dyt": {"skip_kind": "preln", "skip_norm": "dyt"},
    # rules that keep more than one tensor
    "b2t": {"skip_kind": "b2t"},
    "residual_dual": {"skip_kind": "residual_dual"},
    "x0": {"skip_kind": "x0"},
    "dlcl": {"skip_kind": "dlcl"},
    "denseformer": {"skip_kind": "denseformer"},
    "attnres": {"skip_kind": "attnres"},
    "hyper": {"skip_kind": "hyper"},
    "mhc": {"skip_kind": "mhc"},
    # rivals without a norm, or with one where their papers have it
    **{kind: {"skip_kind": kind} for kind in ("rezero", "skipinit", "layerscale", "scaled", "learned_scalar")},
    "residual_scaling": {"skip_kind": "residual_scaling"},
    **{kind: {"skip_kind": kind} for kind in ("deepnorm", "admin", "fixup", "tfixup", "gpt2")},
    # in place of the addition of a post-norm Transformer
    **{kind: {"skip_kind": kind, "skip_norm": "layer"} for kind in ("highway", "constant", "exclusive_gate")},
    **{kind: {"skip_kind": kind, "skip_norm": "layer"} for kind in ("shortcut_gate", "conv_shortcut", "laurel")},
    "dropout_shortcut": {"skip_kind": "dropout_shortcut", "skip_norm": "layer"},
}

_BIG = {
    "encoder_embed_dim": 1024,
    "encoder_ffn_embed_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
}

# size -> what differs from Base; the sizes of fairseq's architecture of the same name
SIZES: dict[str, dict[str, Any]] = {
    "": {},
    "_tiny": {
        "encoder_embed_dim": 64,
        "encoder_ffn_embed_dim": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
    },
    "_iwslt_de_en": {"encoder_ffn_embed_dim": 1024, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    # the paper's EN-VI model: tensor2tensor's transformer_base with shared embeddings
    "_iwslt_en_vi": {"dropout": 0.1, "share_all_embeddings": True},
    "_wmt_en_de": {},
    "_vaswani_wmt_en_de_big": {**_BIG, "dropout": 0.3},
    "_vaswani_wmt_en_fr_big": {**_BIG, "dropout": 0.1},
}

# fields of fairseq's config that would add a residual of fairseq's own (BASE layers) or only serve old checkpoints
_LEFT_OUT = {"char_inputs", "base_layers", "base_sublayers", "base_shuffle", "_name"}
_FOLLOWS_ENCODER = {"decoder_embed_dim", "decoder_ffn_embed_dim"}
_FOLLOWS_DECODER = {"decoder_input_dim", "decoder_output_dim"}


def _flat_fields() -> Iterator[tuple[str, Any, Any]]:
    """fairseq's nested ``TransformerConfig`` as flat fields, named like fairseq's command-line options."""
    nested = {"encoder": EncDecBaseConfig, "decoder": DecoderConfig, "quant_noise": QuantNoiseConfig}
    for outer in fields(TransformerConfig):
        inner = fields(nested[outer.name]) if outer.name in nested else [outer]
        for item in inner:
            name = item.name if item is outer else f"{outer.name}_{item.name}"
            if item.name in _LEFT_OUT:
                continue
            kind, default, metadata = item.type, item.default, dict(item.metadata)
            if name in _FOLLOWS_ENCODER | _FOLLOWS_DECODER:
                kind, default = Optional[int], None
                leader = "encoder's" if name in _FOLLOWS_ENCODER else "decoder's embedding dimension"
                metadata["help"] = f"{metadata.get('help', name.replace('_', ' '))} (default: the {leader})"
            elif item.name == "layers_to_keep":
                kind = Optional[str]  # fairseq declares a list of ints and then splits it at commas
            assert default is not MISSING, name
            yield name, kind, field(default=default, metadata=metadata)


SkipTransformerConfig = make_dataclass(
    "SkipTransformerConfig",
    list(_flat_fields()),
    bases=(SkipConfig, FixNormConfig, SkipLogConfig),
    namespace={"__doc__": "Every option of a skip Transformer, flat; the defaults are Base with rSkip+LN, λ = 2."},
)


def arch_config(arch: str, defaults: dict[str, Any]) -> type[FairseqDataclass]:
    """A dataclass like :data:`SkipTransformerConfig` whose defaults are the architecture's, so that they hold wherever
    fairseq builds a model: command line, hydra, checkpoint.

    Some three hundred are made when the plugin is imported: ``make_dataclass`` would compile a constructor for each.
    """
    known = dict(SkipTransformerConfig.__dataclass_fields__)
    for name, value in defaults.items():
        known[name] = copy.copy(known[name])
        known[name].default = value

    def __init__(self, **values):
        SkipTransformerConfig.__init__(self, **{**defaults, **values})

    members = {"__init__": __init__, "__dataclass_fields__": known, **defaults}
    return type(f"SkipTransformerConfig_{arch}", (SkipTransformerConfig,), members)


def architectures() -> Iterator[tuple[str, type[FairseqDataclass]]]:
    """Every architecture's name and config."""
    for variant, skip in VARIANTS.items():
        for size, sizes in SIZES.items():
            arch = f"transformer_{variant}{size}"
            yield arch, arch_config(arch, {**skip, **sizes})


# file of fairseq_rskip.residual -> title of its rules in :func:`overview`
FAMILIES = {
    "paper": "of Liu et al. 2020, and plain ones",
    "adaptive": "with an adaptive λ",
    "placement": "by the place and kind of the norm",
    "scaled": "with a weighted branch or skip, or a start of its own",
    "gates": "with a gate or transform on the shortcut",
    "streams": "that keep two tensors",
    "history": "that keep the output of every layer",
    "hyper": "that keep several streams",
}


def equation(kind: str) -> str:
    """The equations of a kind, as the first sentence of its docstring has them."""
    parts = " ".join((KINDS[kind].__doc__ or "").split()).split("``")
    found: list[str] = []
    for text, formula in zip(parts[::2], parts[1::2]):
        if found and re.search(r"[.:] ", text):
            break
        found += [formula] if " = " in formula else []
    return ", ".join(found)


def overview() -> str:
    """The architectures: every rule once, by family and with its equation, and every size once."""
    lines = ["--arch transformer_RULE or transformer_RULE_SIZE (python -m fairseq_rskip describe ARCH shows one)", ""]
    width = max(map(len, VARIANTS))
    for family, title in FAMILIES.items():
        lines.append(f"Rules {title}:")
        for variant, skip in VARIANTS.items():
            if KINDS[skip["skip_kind"]].__module__.endswith(f".{family}"):
                given = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in list(skip.items())[1:])
                lines.append(f"  {variant:{width}}  {equation(skip['skip_kind'])}{f'  ({given})' if given else ''}")
        lines.append("")
    dims = {"encoder_embed_dim": 512, "encoder_layers": 6, "encoder_ffn_embed_dim": 2048, "encoder_attention_heads": 8}
    lines.append("Sizes (encoder layers × width, feed-forward width, heads):")
    for size, changes in SIZES.items():
        dim, layers, ffn, heads = (changes.get(name, default) for name, default in dims.items())
        lines.append(f"  {size.lstrip('_') or 'none':23}  {layers} × {dim}, {ffn}, {heads}")
    return "\n".join(lines)


def resolve(cfg) -> TransformerConfig:
    """fairseq's nested config of a flat one (dataclass or DictConfig), with the skip options as ``.skip``."""
    flat = {f.name: getattr(cfg, f.name) for f in fields(SkipTransformerConfig) if f.name != "_name"}
    skip = SkipConfig(**{f.name: flat.pop(f.name) for f in fields(SkipConfig) if f.name != "_name"})
    for f in fields(SkipLogConfig):
        flat.pop(f.name, None)  # of the training, not of the model
    for name in _FOLLOWS_ENCODER:
        flat[name] = flat[name] or flat[name.replace("decoder", "encoder")]
    for name in _FOLLOWS_DECODER:
        flat[name] = flat[name] or flat["decoder_embed_dim"]
    config = TransformerConfig()
    for name, value in flat.items():
        setattr(config, name, value)
    config.skip = skip
    return config
