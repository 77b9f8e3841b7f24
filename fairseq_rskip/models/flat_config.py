"""Every option of a skip Transformer as one flat config, and fairseq's nested config of it."""

from collections.abc import Iterator
from dataclasses import MISSING, field, fields, make_dataclass
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_config import (
    DecoderConfig,
    EncDecBaseConfig,
    QuantNoiseConfig,
)
from fairseq.models.transformer_lm import TransformerLanguageModelConfig

from fairseq_rskip.modules.fixnorm import FixNormConfig
from fairseq_rskip.modules.skip_config import SkipConfig
from fairseq_rskip.modules.step_hooks import TrainingConfig

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


def _config(name: str, model: str, own: Iterator[tuple[str, Any, Any]]) -> Any:
    """The dataclass ``name``: its ``own`` fields, of fairseq, and those of this package."""
    about = f"Every option of a {model}, flat. The defaults are Base with rSkip+LN, λ = 2."
    bases = (SkipConfig, FixNormConfig, TrainingConfig)
    return make_dataclass(
        name, list(own), bases=bases, namespace={"__doc__": about, "__module__": __name__}
    )


SkipTransformerConfig = _config("SkipTransformerConfig", "skip Transformer", _flat_fields())
SkipLanguageModelConfig = _config("SkipLanguageModelConfig", "skip language model", _lm_fields())


def resolve(cfg, base: type[FairseqDataclass] = SkipTransformerConfig) -> TransformerConfig:
    """fairseq's nested config of a flat one (dataclass or DictConfig of ``base``).

    The skip options are its ``skip``, the names of its stacks its ``sides``. A language model's
    encoder has no layers.
    """
    of_skip = {f.name for f in fields(SkipConfig)} - {"_name"}
    of_training = {f.name for f in fields(TrainingConfig)}
    skip = SkipConfig(**{name: getattr(cfg, name) for name in of_skip})
    flat = {}  # what is left: fairseq's own options of the model
    for f in fields(base):
        if f.name not in of_skip | of_training | {"_name"}:
            flat[f.name] = getattr(cfg, f.name)
    for name in _FOLLOWS_ENCODER:
        if flat[name] is None:
            flat[name] = flat[name.replace("decoder", "encoder")]
    for name in _FOLLOWS_DECODER:
        if flat[name] is None:
            flat[name] = flat["decoder_embed_dim"]
    config = TransformerConfig()
    for name, value in flat.items():
        setattr(config, name, value)  # fairseq's config puts encoder_layers into encoder.layers
    config.skip = skip
    config.sides = ("encoder", "decoder")
    if base is SkipLanguageModelConfig:
        config.sides = ("decoder",)
        config.encoder.layers = 0
    return config
