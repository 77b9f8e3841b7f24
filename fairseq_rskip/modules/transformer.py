"""Encoder and decoder stacks: fairseq's own, with the layers of :mod:`fairseq_rskip.modules.transformer_layer`."""

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules.checkpoint_activations import checkpoint_wrapper

from fairseq_rskip.modules.fixnorm import UnitProjection
from fairseq_rskip.modules.transformer_layer import SkipTransformerDecoderLayer, SkipTransformerEncoderLayer
from fairseq_rskip.norms import create_norm
from fairseq_rskip.residual import skips


def wrap_layer(layer, cfg):
    """Apply activation checkpointing and FSDP to a layer as ``cfg`` (a ``TransformerConfig``) asks for."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    # a checkpointed layer is always an FSDP unit of its own, whatever its size
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


class _SkipStack:
    """What both stacks share: their layers' numbers, and the norm after the last layer."""

    built_layers = 0

    def next_index(self) -> int:
        self.built_layers += 1
        return self.built_layers - 1

    def add_final_norm(self) -> None:
        """Normalise what leaves the stack where the last skip connection leaves it as it is, as in pre-norm."""
        found = list(skips(self).values())
        if self.layer_norm is None and found and found[-1].needs_final_norm():
            name = found[-1].options.norm
            self.layer_norm = create_norm("layer" if name == "none" else name, found[-1].dim)


class SkipTransformerEncoder(_SkipStack, TransformerEncoderBase):
    """fairseq's Transformer encoder over :class:`SkipTransformerEncoderLayer`."""

    def __init__(self, cfg, *args, **options):
        super().__init__(cfg, *args, **options)
        self.add_final_norm()

    def build_encoder_layer(self, cfg):
        return wrap_layer(SkipTransformerEncoderLayer(cfg, self.next_index(), return_fc=self.return_fc), cfg)


class SkipTransformerDecoder(_SkipStack, TransformerDecoderBase):
    """fairseq's Transformer decoder over :class:`SkipTransformerDecoderLayer`."""

    def __init__(self, cfg, *args, **options):
        super().__init__(cfg, *args, **options)
        if not cfg.no_decoder_final_norm:
            self.add_final_norm()

    def build_output_projection(self, cfg, dictionary, embed_tokens):
        super().build_output_projection(cfg, dictionary, embed_tokens)
        if cfg.fix_norm:
            self.output_projection = UnitProjection(self.output_projection.weight)

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        return wrap_layer(SkipTransformerDecoderLayer(cfg, no_encoder_attn, self.next_index()), cfg)
