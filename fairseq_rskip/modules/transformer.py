"""Encoder and decoder of the Transformer (Vaswani et al. 2017) over layers of this package.

The stacks are fairseq's own.

The layers take the place of fairseq's ``TransformerEncoderLayerBase`` and
``TransformerDecoderLayerBase``: same inputs, same parameter names for attention and feed-forward,
the same order of random draws at construction and in dropout. Only the residual differs:
``h, carried = skip.prepare(x)`` and ``skip(x, dropout(F(h)), carried)`` instead of LayerNorm and
add. Tensors are ``(seq_len, batch, embed_dim)``.
"""

import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import MultiheadAttention
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from fairseq_rskip.modules.fixnorm import UnitProjection
from fairseq_rskip.modules.upgrade import upgrade_layer
from fairseq_rskip.residual import BranchWeights, Place, SkipConnection, Weight, skips


class SkipTransformerLayerBase(nn.Module):
    """The parts that encoder and decoder layer share.

    These are the feed-forward block, its skip connections, and the loading of stock checkpoints.

    Args:
        cfg: fairseq ``TransformerConfig`` whose ``skip`` is a
            :class:`~fairseq_rskip.modules.skip_config.SkipConfig`
        side: ``cfg.encoder`` or ``cfg.decoder``
        other: the other of the two
        index: the layer's number on its side, from 0

    ``side.normalize_before`` asks for a norm before the branch: the kind's own, or layer norm where
    it has none. Kinds with a norm behind the branch or after the sum refuse it.
    """

    def __init__(self, cfg, side, other, index: int):
        super().__init__()
        self.cfg, self.index = cfg, index
        self.loaded_from_stock = False  # whether its weights are those of a stock checkpoint
        self.depth, self.other_depth = side.layers, other.layers
        other_is_decoder = other is cfg.decoder
        self.other_sublayers = 3 if other_is_decoder and not cfg.no_cross_attention else 2
        self.embed_dim = side.embed_dim
        self.normalize_before = side.normalize_before
        self.noise = cfg.quant_noise
        self.dropout_module = FairseqDropout(cfg.dropout, module_name=type(self).__name__)
        self.activation_fn = utils.get_activation_fn(activation=cfg.activation_fn)
        rate = float(cfg.activation_dropout or cfg.relu_dropout or 0)
        self.activation_dropout_module = FairseqDropout(rate, module_name=type(self).__name__)

    def build_attention(self, side, **options) -> MultiheadAttention:
        noise = {"q_noise": self.noise.pq, "qn_block_size": self.noise.pq_block_size}
        options = {"xformers_att_config": side.xformers_att_config, **noise, **options}
        return MultiheadAttention(
            self.embed_dim, side.attention_heads, dropout=self.cfg.attention_dropout, **options
        )

    def build_feed_forward(self, side) -> None:
        inner, noise = side.ffn_embed_dim, (self.noise.pq, self.noise.pq_block_size)
        self.fc1 = quant_noise(nn.Linear(self.embed_dim, inner), *noise)
        self.fc2 = quant_noise(nn.Linear(inner, self.embed_dim), *noise)

    def build_skips(self, side: str, sublayers: tuple[str, ...]) -> list[SkipConnection]:
        """A skip connection for each sublayer; each has rescaled its branch.

        The names are those of :class:`~fairseq_rskip.residual.Place`.
        """
        skips = []
        for position, sublayer in enumerate(sublayers):
            place = Place(
                side,
                sublayer,
                index=self.index,
                depth=self.depth,
                other_depth=self.other_depth,
                position=position,
                sublayers=len(sublayers),
                other_sublayers=self.other_sublayers,
            )
            skip = self.cfg.skip.build(self.embed_dim, place, self.normalize_before)
            skip.initialise(self.branch_weights(sublayer))
            if skips:
                skip.share_with(skips[0])
            skips.append(skip)
        # noted here, because --ddp-backend fully_sharded takes the parameters out of a built layer
        self.learns = any(skip.learned() for skip in skips)
        return skips

    def branch_weights(self, sublayer: str) -> BranchWeights:
        """The weights of a sublayer, by role, with fairseq's initial standard deviations."""
        if sublayer == "ffn":
            # torch's nn.Linear: uniform in ±1/√fan_in
            linears = {"fc1": self.fc1, "fc2": self.fc2}
            return {
                role: Weight(m.weight, (3 * m.in_features) ** -0.5, m.bias)
                for role, m in linears.items()
            }
        attention = getattr(self, sublayer)
        branch = {}
        for role in ("q", "k", "v", "out"):
            projection = getattr(attention, f"{role}_proj")
            # fairseq's gain of Xavier's initialisation
            gain = 0.5**0.5 if attention.qkv_same_dim and role != "out" else 1.0
            std = gain * Weight(projection.weight, 1.0).xavier
            branch[role] = Weight(projection.weight, std, projection.bias)
        return branch

    def feed_forward(self, x: Tensor) -> Tensor:
        """F of the feed-forward block, before dropout: ``(seq_len, batch, embed_dim)``."""
        return self.fc2(self.activation_dropout_module(self.activation_fn(self.fc1(x))))

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Rename a stock fairseq layer's normalisations to ours and drop its duplicates, in place.

        Raises :class:`~fairseq_rskip.errors.UserError` where the checkpoint was trained with
        another rule.
        """
        children = dict(self.named_children())
        self.loaded_from_stock = upgrade_layer(state_dict, name, children)


class SkipTransformerEncoderLayer(SkipTransformerLayerBase):
    """Encoder layer: self-attention and feed-forward block, each with its own skip connection."""

    def __init__(self, cfg, index: int = 0, return_fc: bool = False):
        super().__init__(cfg, cfg.encoder, cfg.decoder, index)
        self.return_fc = return_fc
        self.self_attn = self.build_attention(cfg.encoder, self_attention=True)
        self.build_feed_forward(cfg.encoder)
        self.self_attn_skip, self.final_skip = self.build_skips("encoder", ("self_attn", "ffn"))
        # fairseq's encoder asks its first layer for these before it takes the fused path, which
        # knows no skip of ours
        self.load_to_BT = self.can_use_fastpath = self.ever_training = False
        self.cfg_checkpoint_activations = cfg.checkpoint_activations

    def forward(
        self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None
    ):
        """Args:
            x: shape ``(seq_len, batch, embed_dim)``
            encoder_padding_mask: boolean, shape ``(batch, seq_len)``, True where padded
            attn_mask: shape ``(seq_len, seq_len)``, 1 where attention is not allowed

        Returns:
            Shape ``(seq_len, batch, embed_dim)``; with ``return_fc`` also F of the feed-forward
                block.
        """
        if attn_mask is not None:
            minus_infinity = -1e8 if x.dtype == torch.float32 else -1e4
            attn_mask = attn_mask.masked_fill(attn_mask.to(torch.bool), minus_infinity)
        padding_mask = None
        if encoder_padding_mask is not None:
            padding_mask = encoder_padding_mask.transpose(0, 1)

        query, carried = self.self_attn_skip.prepare(x)
        f_x, _ = self.self_attn(
            query, query, query, encoder_padding_mask, need_weights=False, attn_mask=attn_mask
        )
        x = self.self_attn_skip(x, self.dropout_module(f_x), carried, padding_mask)

        h, carried = self.final_skip.prepare(x)
        f_x = self.feed_forward(h)
        x = self.final_skip(x, self.dropout_module(f_x), carried, padding_mask)
        return (x, f_x) if self.return_fc else x


class SkipTransformerDecoderLayer(SkipTransformerLayerBase):
    """Decoder layer of self-attention, encoder attention and feed-forward block.

    Each has its own skip connection.
    """

    def __init__(self, cfg, no_encoder_attn: bool = False, index: int = 0):
        super().__init__(cfg, cfg.decoder, cfg.encoder, index)
        self.cross_self_attention = cfg.cross_self_attention
        self.need_attn = True
        self.self_attn = self.build_attention(
            cfg.decoder, self_attention=not cfg.cross_self_attention
        )
        self.encoder_attn = None
        if not no_encoder_attn:
            options = {
                "kdim": cfg.encoder.embed_dim,
                "vdim": cfg.encoder.embed_dim,
                "encoder_decoder_attention": True,
            }
            options["xformers_att_config"] = cfg.encoder.xformers_att_config
            self.encoder_attn = self.build_attention(cfg.decoder, **options)
        self.build_feed_forward(cfg.decoder)
        sublayers = (
            ("self_attn", "ffn") if no_encoder_attn else ("self_attn", "encoder_attn", "ffn")
        )
        skips = self.build_skips("decoder", sublayers)
        self.self_attn_skip = skips[0]
        self.encoder_attn_skip = None if no_encoder_attn else skips[1]
        self.final_skip = skips[-1]

    def self_attention(
        self, x, encoder_out, encoder_padding_mask, incremental_state, attn_mask, padding_mask
    ) -> Tensor:
        """F of the self-attention block.

        Under ``--cross-self-attention`` keys and values start with the encoder's.
        """
        key = x
        if self.cross_self_attention and not self._has_cached_keys(incremental_state):
            key = torch.cat((encoder_out, x), dim=0)
            attn_mask = _with_encoder_columns(attn_mask, encoder_out)
            padding_mask = _with_encoder_padding(padding_mask, encoder_padding_mask, encoder_out)
        options = {
            "incremental_state": incremental_state,
            "attn_mask": attn_mask,
            "need_weights": False,
        }
        return self.self_attn(x, key, key, padding_mask, **options)[0]

    def _has_cached_keys(self, incremental_state) -> bool:
        """Whether self-attention has the keys of earlier steps, the encoder's among them."""
        return "prev_key" in self.self_attn._get_input_buffer(incremental_state)

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, list[Tensor | None] | None]:
        """Args:
            x: shape ``(tgt_len, batch, embed_dim)``
            encoder_out: shape ``(src_len, batch, encoder_embed_dim)``
            encoder_padding_mask: boolean, shape ``(batch, src_len)``, True where padded
            self_attn_mask: shape ``(tgt_len, tgt_len)``, -inf where attention is not allowed
            self_attn_padding_mask: boolean, shape ``(batch, tgt_len)``, True where padded
            need_attn: return attention weights, averaged over heads
            need_head_weights: return them for each head

        Returns:
            Output of shape ``(tgt_len, batch, embed_dim)``, attention weights or None, None
                (fairseq's ONNX state).
        """
        padding_mask = None
        if self_attn_padding_mask is not None:
            padding_mask = self_attn_padding_mask.transpose(0, 1)

        query, carried = self.self_attn_skip.prepare(x)
        f_x = self.self_attention(
            query,
            encoder_out,
            encoder_padding_mask,
            incremental_state,
            self_attn_mask,
            self_attn_padding_mask,
        )
        x = self.self_attn_skip(x, self.dropout_module(f_x), carried, padding_mask)

        attn: Tensor | None = None
        if self.encoder_attn is not None and encoder_out is not None:
            query, carried = self.encoder_attn_skip.prepare(x)
            weights = need_attn or need_head_weights or (not self.training and self.need_attn)
            options = {
                "static_kv": True,
                "need_weights": weights,
                "need_head_weights": need_head_weights,
            }
            f_x, attn = self.encoder_attn(
                query, encoder_out, encoder_out, encoder_padding_mask, incremental_state, **options
            )
            x = self.encoder_attn_skip(x, self.dropout_module(f_x), carried, padding_mask)

        h, carried = self.final_skip.prepare(x)
        f_x = self.feed_forward(h)
        return self.final_skip(x, self.dropout_module(f_x), carried, padding_mask), attn, None

    def make_generation_fast_(self, need_attn: bool = False, **kwargs) -> None:
        """fairseq's hook before generation: attention weights only where asked for."""
        self.need_attn = need_attn


def _with_encoder_columns(attn_mask: Tensor | None, encoder_out: Tensor) -> Tensor | None:
    """``attn_mask`` with zeros in front, for the encoder's positions: attention is allowed."""
    if attn_mask is None:
        return None
    return F.pad(attn_mask, (encoder_out.size(0), 0))


def _with_encoder_padding(
    padding_mask: Tensor | None, encoder_padding_mask: Tensor | None, encoder_out: Tensor
) -> Tensor | None:
    """``padding_mask`` with the encoder's in front; None where the decoder has no padding."""
    if padding_mask is None:
        return None
    if encoder_padding_mask is None:
        return F.pad(padding_mask, (encoder_out.size(0), 0))
    return torch.cat((encoder_padding_mask, padding_mask), dim=1)


def wrap_layer(layer, cfg):
    """Apply activation checkpointing and FSDP to a layer, by ``cfg``, a ``TransformerConfig``."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    # a checkpointed layer is always an FSDP unit of its own, whatever its size
    return fsdp_wrap(
        layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    )


class _SkipStack:
    """What both stacks share: their layers' numbers, and the norm after the last layer."""

    built_layers = 0

    def next_index(self) -> int:
        self.built_layers += 1
        return self.built_layers - 1

    def add_final_norm(self) -> None:
        """Add a norm after the stack if its last skip connection needs one, as in pre-norm."""
        connections = list(skips(self).values())
        if not connections or not connections[-1].needs_final_norm():
            return
        name = connections[-1].options.norm
        if self.layer_norm is None or name not in ("none", "layer"):  # fairseq made its own
            self.layer_norm = connections[-1].new_norm("layer" if name == "none" else name)


class SkipTransformerEncoder(_SkipStack, TransformerEncoderBase):
    """fairseq's Transformer encoder over :class:`SkipTransformerEncoderLayer`."""

    def __init__(self, cfg, *args, **options):
        super().__init__(cfg, *args, **options)
        self.add_final_norm()

    def build_encoder_layer(self, cfg):
        return wrap_layer(
            SkipTransformerEncoderLayer(cfg, self.next_index(), return_fc=self.return_fc), cfg
        )


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
