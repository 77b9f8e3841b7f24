"""The table of architectures, every variant in every size.

``transformer_<variant><size>`` is for translation, ``transformer_lm_<variant><size>`` for language
modelling.
"""

import copy
from collections.abc import Iterator
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.models import ARCH_MODEL_REGISTRY

from fairseq_rskip.errors import UserError
from fairseq_rskip.models.flat_config import SkipLanguageModelConfig
from fairseq_rskip.residual import own_rules

# the variant without defaults of its own: ``--arch transformer_skip_tiny --skip-kind deepnorm``
ANY_RULE = "skip"


def _named_as(*kinds: str, **defaults: Any) -> dict[str, dict[str, Any]]:
    """The variants that have the name of their kind."""
    return {kind: {"skip_kind": kind, **defaults} for kind in kinds}


# family of rules -> variant -> defaults of SkipConfig (docs/rules.md has the same rows)
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "of Liu et al. 2020, and plain ones": {
        "postln": {"skip_kind": "xskip", "skip_norm": "layer", "skip_lambda": 1.0},
        "xskip": {"skip_kind": "xskip", "skip_norm": "none"},
        "xskip_ln": {"skip_kind": "xskip", "skip_norm": "layer"},
        "xskip_bn": {"skip_kind": "xskip", "skip_norm": "batch"},
        "rskip_ln": {"skip_kind": "rskip", "skip_norm": "layer"},
        "rskip_bn": {"skip_kind": "rskip", "skip_norm": "batch"},
        "wskip": {"skip_kind": "wskip", "skip_norm": "none"},
        "wskip_ln": {"skip_kind": "wskip", "skip_norm": "layer"},
    },
    "with an adaptive λ": {
        "askip_ln": {"skip_kind": "askip", "skip_norm": "layer"},
    },
    "by the place and kind of the norm": {
        **_named_as("preln", "periln", "outln", "lnscale", "mixln", "keel"),
        "scalenorm": {"skip_kind": "preln", "skip_norm": "scale", "fix_norm": True},
        "adanorm": {"skip_kind": "preln", "skip_norm": "ada"},
        "rmsnorm": {"skip_kind": "preln", "skip_norm": "rms"},
        "dyt": {"skip_kind": "preln", "skip_norm": "dyt"},
        "derf": {"skip_kind": "preln", "skip_norm": "derf"},
    },
    "with a weighted branch or skip, or a start of its own": {
        **_named_as("rezero", "skipinit", "layerscale", "scaled", "learned_scalar"),
        **_named_as("residual_scaling", "deepnorm", "admin", "fixup", "tfixup", "gpt2"),
        **_named_as("completep", "prores", "branchnorm"),
        "ngpt": {"skip_kind": "ngpt", "fix_norm": True},
    },
    "that turn x by an angle": _named_as("angle", "learned_angle", "geonorm", "nag"),
    "with a gate or transform on the shortcut": {
        **_named_as("review", "gpas", "orthogonal", "ddl", "gtrxl"),
        # in place of the addition of a post-norm Transformer
        **_named_as("highway", "constant", "exclusive_gate", "shortcut_gate", skip_norm="layer"),
        **_named_as("conv_shortcut", "laurel", "gru_gate", "dropout_shortcut", skip_norm="layer"),
    },
    "that keep two tensors or the output of every layer": {
        **_named_as("b2t", "residual_dual", "x0", "siamesenorm", "dlcl", "denseformer"),
        **_named_as("spannorm"),
    },
    "that read earlier outputs with weights for each position": {
        **_named_as("mudd", "attnres", "mhar", "delta_attnres", "multi_gate"),
    },
    "that keep several streams, or mix parts of one": {
        **_named_as("hyper", "fractional", "mhc", "ihc", "gated_residual", "single_pass_mhc"),
        "mhc_lite": {"skip_kind": "mhc", "skip_matrix": "permutations"},
        "kromhc": {"skip_kind": "mhc", "skip_matrix": "kronecker"},
        "ohc": {"skip_kind": "mhc", "skip_matrix": "quaternions"},
        "jpmhc": {"skip_kind": "mhc", "skip_matrix": "cayley"},
    },
}
VARIANTS = {name: skip for family in FAMILIES.values() for name, skip in family.items()}


def _side(side: str, dim: int, ffn: int, layers: int, heads: int) -> dict[str, int]:
    names = {"embed_dim": dim, "ffn_embed_dim": ffn, "layers": layers, "attention_heads": heads}
    return {f"{side}_{name}": value for name, value in names.items()}


_BIG = {**_side("encoder", 1024, 4096, 6, 16), "decoder_attention_heads": 16}

# size -> what differs from Base; the sizes of fairseq's architecture of the same name
SIZES: dict[str, dict[str, Any]] = {
    "": {},
    "_tiny": {**_side("encoder", 64, 64, 2, 2), "decoder_layers": 2, "decoder_attention_heads": 2},
    "_iwslt_de_en": {
        "encoder_ffn_embed_dim": 1024,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    },
    # the paper's EN-VI model: tensor2tensor's transformer_base with shared embeddings
    "_iwslt_en_vi": {"dropout": 0.1, "share_all_embeddings": True},
    "_wmt_en_de": {},
    "_vaswani_wmt_en_de_big": {**_BIG, "dropout": 0.3},
    "_vaswani_wmt_en_fr_big": {**_BIG, "dropout": 0.1},
}

# the same for language models: fairseq's ``transformer_lm``, _gpt and _wiki103
LM_SIZES: dict[str, dict[str, Any]] = {
    "": {},
    "_tiny": _side("decoder", 64, 64, 2, 2),
    "_gpt": {
        **_side("decoder", 768, 3072, 12, 12),
        "attention_dropout": 0.1,
        "activation_fn": "gelu",
    },
    # Baevski and Auli 2019: adaptive input and softmax, pre-norm without a norm after the last
    # layer
    "_wiki103": {
        **_side("decoder", 1024, 4096, 16, 8),
        "dropout": 0.3,
        "attention_dropout": 0.1,
        "activation_dropout": 0.1,
        "adaptive_input": True,
        "adaptive_input_cutoff": "20000,60000",
        "adaptive_softmax_cutoff": "20000,60000",
        "adaptive_softmax_dropout": 0.2,
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": True,
        "no_decoder_final_norm": True,
    },
}

# fairseq has a transformer_lm_gpt2_tiny of its own, of another width
_LM_NAMES = {"gpt2": "gpt2_init"}


def first_variant(kind: str) -> str:
    """The first variant of a rule: ``postln`` of xskip, ``rskip_ln`` of rskip."""
    return next(name for name, skip in VARIANTS.items() if skip["skip_kind"] == kind)


def translation_names(variant: str) -> list[str]:
    """The architectures of a variant for translation, in the order of ``SIZES``."""
    return [f"transformer_{variant}{size}" for size in SIZES]


def language_model_names(variant: str) -> list[str]:
    """The architectures of a variant for language models, in the order of ``LM_SIZES``."""
    return [f"transformer_lm_{_LM_NAMES.get(variant, variant)}{size}" for size in LM_SIZES]


def _add_own_rules() -> None:
    """Make a variant of each rule of the user's own, in a family of their own.

    Raises ``UserError`` where one of its architectures exists already.
    """
    own = _named_as(*own_rules.own_kinds())
    taken = set(ARCH_MODEL_REGISTRY)
    for variant in (ANY_RULE, *VARIANTS):
        taken.update(translation_names(variant), language_model_names(variant))
    for kind in own:
        names = translation_names(kind) + language_model_names(kind)
        for name in names:
            if name in taken:
                raise UserError(
                    f"{own_rules.VARIABLE}: {own_rules.file_of(kind)} registers {kind!r}, but "
                    f"there is an architecture {name}: expected another name"
                )
        taken.update(names)
    if own:
        FAMILIES[f"of your own ({own_rules.VARIABLE})"] = own
        VARIANTS.update(own)


_add_own_rules()


def _with_defaults(
    base: type[FairseqDataclass], arch: str, defaults: dict[str, Any]
) -> type[FairseqDataclass]:
    """A dataclass like ``base`` whose defaults are the architecture's.

    They hold wherever fairseq builds a model: command line, hydra, checkpoint.

    Some five hundred are made when the plugin is imported: ``make_dataclass`` would compile a
    constructor for each.
    """
    known = dict(base.__dataclass_fields__)
    for name, value in defaults.items():
        known[name] = copy.copy(known[name])
        known[name].default = value

    def __init__(self, **values):
        base.__init__(self, **{**defaults, **values})

    members = {"__init__": __init__, "__dataclass_fields__": known, **defaults}
    return type(f"{base.__name__}_{arch}", (base,), members)


def arch_configs(base: type[FairseqDataclass]) -> Iterator[tuple[str, type[FairseqDataclass]]]:
    """Name and config of every architecture whose config is a ``base``."""
    of_text = base is SkipLanguageModelConfig
    for variant, skip in {ANY_RULE: {}, **VARIANTS}.items():
        names = language_model_names(variant) if of_text else translation_names(variant)
        sizes = LM_SIZES if of_text else SIZES
        for arch, values in zip(names, sizes.values()):
            yield arch, _with_defaults(base, arch, {**skip, **values})
