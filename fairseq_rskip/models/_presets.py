"""The table of architectures, every variant in every size.

``transformer_<variant><size>`` is for translation, ``transformer_lm_<variant><size>`` for language
modelling.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_config import (
    DecoderConfig,
    EncDecBaseConfig,
    QuantNoiseConfig,
)
from fairseq.models.transformer_lm import TransformerLanguageModelConfig

from fairseq_rskip.errors import UserError
from fairseq_rskip.modules.fixnorm import FixNormConfig
from fairseq_rskip.modules.parameter_groups import SkipRateConfig
from fairseq_rskip.modules.skip_config import SkipConfig
from fairseq_rskip.modules.skip_log import SkipLogConfig
from fairseq_rskip.residual import KINDS, own_rules

# the variant without defaults of its own: ``--arch transformer_skip_tiny --skip-kind deepnorm``
ANY_RULE = "skip"


def _named_as(*kinds: str, **defaults: Any) -> dict[str, dict[str, Any]]:
    """The variants that have the name of their kind."""
    return {kind: {"skip_kind": kind, **defaults} for kind in kinds}


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
    **_named_as("preln", "periln", "outln", "lnscale", "mixln", "keel"),
    "scalenorm": {"skip_kind": "preln", "skip_norm": "scale", "fix_norm": True},
    "adanorm": {"skip_kind": "preln", "skip_norm": "ada"},
    "rmsnorm": {"skip_kind": "preln", "skip_norm": "rms"},
    "dyt": {"skip_kind": "preln", "skip_norm": "dyt"},
    "derf": {"skip_kind": "preln", "skip_norm": "derf"},
    # rules that keep more than one tensor
    **_named_as("b2t", "residual_dual", "x0", "siamesenorm", "dlcl", "denseformer"),
    **_named_as("attnres", "hyper", "fractional", "mhc", "spannorm", "mudd", "mhar"),
    **_named_as("delta_attnres", "ihc", "gated_residual", "multi_gate", "single_pass_mhc"),
    "mhc_lite": {"skip_kind": "mhc", "skip_matrix": "permutations"},
    "kromhc": {"skip_kind": "mhc", "skip_matrix": "kronecker"},
    "ohc": {"skip_kind": "mhc", "skip_matrix": "quaternions"},
    "jpmhc": {"skip_kind": "mhc", "skip_matrix": "cayley"},
    # rivals without a norm, or with one where their papers have it
    **_named_as("rezero", "skipinit", "layerscale", "scaled", "learned_scalar"),
    **_named_as("residual_scaling", "deepnorm", "admin", "fixup", "tfixup", "gpt2"),
    **_named_as("angle", "learned_angle", "geonorm", "nag", "completep", "review"),
    **_named_as("prores", "branchnorm", "gpas", "orthogonal", "ddl"),
    "ngpt": {"skip_kind": "ngpt", "fix_norm": True},
    # in place of the addition of a post-norm Transformer
    **_named_as("highway", "constant", "exclusive_gate", "shortcut_gate", skip_norm="layer"),
    **_named_as("conv_shortcut", "laurel", "gru_gate", "dropout_shortcut", skip_norm="layer"),
}


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


def translation_names(variant: str) -> list[str]:
    """The architectures of a variant for translation, in the order of ``SIZES``."""
    return [f"transformer_{variant}{size}" for size in SIZES]


def language_model_names(variant: str) -> list[str]:
    """The architectures of a variant for language models, in the order of ``LM_SIZES``."""
    return [f"transformer_lm_{_LM_NAMES.get(variant, variant)}{size}" for size in LM_SIZES]


def _add_own_rules() -> None:
    """Make a variant of each rule of the user's own.

    Raises ``UserError`` where one of its architectures exists already.
    """
    taken = set(ARCH_MODEL_REGISTRY)
    for variant in (ANY_RULE, *VARIANTS):
        taken.update(translation_names(variant), language_model_names(variant))
    for kind in own_rules.own_kinds():
        names = translation_names(kind) + language_model_names(kind)
        for name in names:
            if name in taken:
                raise UserError(
                    f"{own_rules.VARIABLE}: {own_rules.file_of(kind)} registers {kind!r}, but "
                    f"there is an architecture {name}: expected another name"
                )
        VARIANTS[kind] = {"skip_kind": kind}
        taken.update(names)


_add_own_rules()

# fields of fairseq's configs that would add a residual of fairseq's own (BASE layers), change the
# sublayer (NormFormer) or only serve old checkpoints
_LEFT_OUT = {"char_inputs", "base_layers", "base_sublayers", "base_shuffle", "_name"}
_LEFT_OUT |= {"scale_fc", "scale_attn", "scale_heads", "scale_resids"}
_LEFT_OUT |= {
    "character_embeddings",
    "character_filters",
    "character_embedding_dim",
    "char_embedder_highway_layers",
}
_FOLLOWS_ENCODER = {"decoder_embed_dim", "decoder_ffn_embed_dim"}
_FOLLOWS_DECODER = {"decoder_input_dim", "decoder_output_dim"}


def _flat_fields() -> Iterator[tuple[str, Any, Any]]:
    """fairseq's nested ``TransformerConfig`` as flat fields, named like its options."""
    nested = {
        "encoder": EncDecBaseConfig,
        "decoder": DecoderConfig,
        "quant_noise": QuantNoiseConfig,
    }
    for outer in fields(TransformerConfig):
        inner = fields(nested[outer.name]) if outer.name in nested else [outer]
        for item in inner:
            name = item.name if item is outer else f"{outer.name}_{item.name}"
            if item.name in _LEFT_OUT:
                continue
            annotation, default, metadata = item.type, item.default, dict(item.metadata)
            if name in _FOLLOWS_ENCODER | _FOLLOWS_DECODER:
                annotation, default = Optional[int], None
                followed = "encoder's"
                if name in _FOLLOWS_DECODER:
                    followed = "decoder's embedding dimension"
                text = metadata.get("help", name.replace("_", " "))
                metadata["help"] = f"{text} (default: the {followed})"
            elif item.name == "layers_to_keep":
                # fairseq declares a list of ints and then splits it at commas
                annotation = Optional[str]
            assert default is not MISSING, name
            yield name, annotation, field(default=default, metadata=metadata)


SkipTransformerConfig = make_dataclass(
    "SkipTransformerConfig",
    list(_flat_fields()),
    bases=(SkipConfig, FixNormConfig, SkipLogConfig, SkipRateConfig),
    namespace={
        "__doc__": "Every option of a skip Transformer, flat. "
        "The defaults are Base with rSkip+LN, λ = 2."
    },
)


def _lm_fields() -> Iterator[tuple[str, Any, Any]]:
    """The fields of fairseq's ``TransformerLanguageModelConfig``.

    Input and output follow the decoder's dimension.
    """
    for item in fields(TransformerLanguageModelConfig):
        annotation, default, metadata = item.type, item.default, dict(item.metadata)
        if item.name in _FOLLOWS_DECODER:
            annotation, default = Optional[int], None
            metadata["help"] += " (default: the decoder's embedding dimension)"
        if item.name not in _LEFT_OUT:
            yield item.name, annotation, field(default=default, metadata=metadata)


SkipLanguageModelConfig = make_dataclass(
    "SkipLanguageModelConfig",
    list(_lm_fields()),
    bases=(SkipConfig, FixNormConfig, SkipLogConfig, SkipRateConfig),
    namespace={
        "__doc__": "Every option of a skip language model, flat. "
        "The defaults are Base with rSkip+LN, λ = 2."
    },
)


def arch_config(
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


def architectures(base: type[FairseqDataclass]) -> Iterator[tuple[str, type[FairseqDataclass]]]:
    """Name and config of every architecture whose config is a ``base``."""
    of_text = base is SkipLanguageModelConfig
    for variant, skip in {ANY_RULE: {}, **VARIANTS}.items():
        names = language_model_names(variant) if of_text else translation_names(variant)
        sizes = LM_SIZES if of_text else SIZES
        for arch, values in zip(names, sizes.values()):
            yield arch, arch_config(base, arch, {**skip, **values})


# family of rules, a file of fairseq_rskip.residual -> its title in :func:`overview`
FAMILIES = {
    "weighted": "of Liu et al. 2020, and plain ones",
    "adaptive": "with an adaptive λ",
    "placement": "by the place and kind of the norm",
    "scaled": "with a weighted branch or skip, or a start of its own",
    "angle": "that turn x by an angle",
    "gates": "with a gate or transform on the shortcut",
    "streams": "that keep two tensors or the output of every layer",
    "routing": "that read earlier outputs with weights for each position",
    "hyper": "that keep several streams, or mix parts of one",
}
if own_rules.own_kinds():
    FAMILIES["own"] = f"of your own ({own_rules.VARIABLE})"


# the further files of a family
_FAMILY_OF_FILE = {
    "branch_weight": "scaled",
    "admin": "scaled",
    "initial_weights": "scaled",
    "schedule": "scaled",
    "ngpt": "scaled",
    "manifold": "hyper",
    "unmixed": "hyper",
    "single_pass": "hyper",
}


def family_of(kind: str) -> str:
    """The family of a kind, by the file of its class."""
    if own_rules.file_of(kind) is not None:
        return "own"
    file = KINDS[kind].__module__.split(".")[-1]
    return _FAMILY_OF_FILE.get(file, file)


def equation(kind: str) -> str:
    """The equations of a kind, as the first sentence of its docstring has them."""
    docstring = " ".join((KINDS[kind].__doc__ or "").split())
    parts = docstring.split("``")
    texts, quoted = parts[::2], parts[1::2]
    formulas: list[str] = []
    for text_before, formula in zip(texts, quoted):
        if formulas and re.search(r"[.:] ", text_before):
            break
        if " = " in formula:
            formulas.append(formula)
    return ", ".join(formulas)


def options_of_variant(variant: str) -> str:
    """What a variant sets beside its kind, as options; a kind of another name, too."""
    options = []
    for name, value in VARIANTS[variant].items():
        if name == "skip_kind" and value == variant:
            continue
        flag = f"--{name.replace('_', '-')}"
        options.append(flag if value is True else f"{flag} {value}")
    return " ".join(options)


def overview() -> str:
    """The architectures: every rule once, by family and with its equation, and every size once."""
    lines = [
        "--arch transformer_RULE or transformer_RULE_SIZE "
        "(python -m fairseq_rskip describe ARCH shows one),",
        "or --arch transformer_skip_SIZE --skip-kind KIND, with the options in brackets",
        "",
    ]
    width = max(map(len, VARIANTS))
    for family, title in FAMILIES.items():
        lines.append(f"Rules {title}:")
        for variant, skip in VARIANTS.items():
            if family_of(skip["skip_kind"]) == family:
                line = f"  {variant:{width}}  {equation(skip['skip_kind'])}"
                options = options_of_variant(variant)
                lines.append(f"{line}  ({options})" if options else line)
        lines.append("")
    lines.append("Sizes (encoder layers × width, feed-forward width, heads):")
    lines += _lines_of_sizes(SIZES, "encoder")
    lines.append("Sizes of --task language_modeling --arch transformer_lm_RULE, layers as above:")
    lines += _lines_of_sizes(LM_SIZES, "decoder")
    return "\n".join(lines)


def _lines_of_sizes(sizes: dict[str, dict[str, Any]], side: str) -> list[str]:
    """A line for each size, with the numbers of its encoder or decoder."""
    lines = []
    for size, changes in sizes.items():
        layers = changes.get(f"{side}_layers", 6)
        dim = changes.get(f"{side}_embed_dim", 512)
        ffn = changes.get(f"{side}_ffn_embed_dim", 2048)
        heads = changes.get(f"{side}_attention_heads", 8)
        lines.append(f"  {size.lstrip('_') or 'none':23}  {layers} × {dim}, {ffn}, {heads}")
    return lines


def resolve(cfg, base: type[FairseqDataclass] = SkipTransformerConfig) -> TransformerConfig:
    """fairseq's nested config of a flat one (dataclass or DictConfig of ``base``).

    The skip options are its ``skip``, the names of its stacks its ``sides``. A language model's
    encoder has no layers.
    """
    of_skip = {f.name for f in fields(SkipConfig)} - {"_name"}
    of_training = {f.name for f in (*fields(SkipLogConfig), *fields(SkipRateConfig))}
    skip = SkipConfig(**{name: getattr(cfg, name) for name in of_skip})
    flat = {}  # what is left: fairseq's own options of the model
    for f in fields(base):
        if f.name not in of_skip | of_training | {"_name"}:
            flat[f.name] = getattr(cfg, f.name)
    for name in _FOLLOWS_ENCODER:
        flat[name] = flat[name] or flat[name.replace("decoder", "encoder")]
    for name in _FOLLOWS_DECODER:
        flat[name] = flat[name] or flat["decoder_embed_dim"]
    config = TransformerConfig()
    for name, value in flat.items():
        setattr(config, name, value)
    config.skip = skip
    config.sides = ("encoder", "decoder")
    if base is SkipLanguageModelConfig:
        config.sides = ("decoder",)
        config.encoder.layers = 0
    return config
