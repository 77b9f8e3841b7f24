"""Encoder and decoder stacks: fairseq's own, with the layers of :mod:`fairseq_rskip.modules.transformer_layer`."""

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules.checkpoint_activations import checkpoint_wrapper

from fairseq_rskip.modules.transformer_layer import SkipTransformerDecoderLayer, SkipTransformerEncoderLayer


def wrap_layer(layer, cfg):
    """Apply activation checkpointing and FSDP to a layer as ``cfg`` (a ``TransformerConfig``) asks for."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    # a checkpointed layer is always an FSDP unit of its own, whatever its size
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


class SkipTransformerEncoder(TransformerEncoderBase):
    """fairseq's Transformer encoder over :class:`SkipTransformerEncoderLayer`."""

    def build_encoder_layer(self, cfg):
        return wrap_layer(SkipTransformerEncoderLayer(cfg, return_fc=self.return_fc), cfg)


class SkipTransformerDecoder(TransformerDecoderBase):
    """fairseq's Transformer decoder over :class:`SkipTransformerDecoderLayer`."""

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        return wrap_layer(SkipTransformerDecoderLayer(cfg, no_encoder_attn), cfg)
