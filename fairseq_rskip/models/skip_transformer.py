"""The Transformer whose every residual is a skip connection.

``transformer_<variant><size>`` translates; ``transformer_lm_<variant><size>`` is its decoder as a
language model (``--task language_modeling``).
"""

from fairseq.models.transformer import TransformerModelBase
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.modules import AdaptiveInput
from fairseq.options import eval_str_list

from fairseq_rskip.errors import UserError
from fairseq_rskip.models.architectures import arch_configs
from fairseq_rskip.models.building import SkipModel, checked, finish, register
from fairseq_rskip.models.flat_config import SkipLanguageModelConfig, SkipTransformerConfig
from fairseq_rskip.modules.transformer import SkipTransformerDecoder, SkipTransformerEncoder


class SkipTransformerModel(SkipModel, TransformerModelBase):
    """Transformer (Vaswani et al. 2017) whose residuals are skip connections (``--skip-kind``)."""

    kind, config = "transformer", SkipTransformerConfig

    @classmethod
    def build_model(cls, cfg, task):
        """Build from a flat config.

        Raises :class:`~fairseq_rskip.errors.UserError` where its options contradict.
        """
        config = checked(cls, cfg)
        if config.share_all_embeddings and task.source_dictionary != task.target_dictionary:
            raise UserError(
                f"--arch {getattr(cfg, '_name', None) or cls.__name__} shares all embeddings, "
                "and the two dictionaries differ: preprocess with --joined-dictionary, "
                "or choose an architecture that does not share them (Base: no suffix)"
            )
        return finish(super().build_model(config, task), task, cfg)

    @classmethod
    def build_encoder(cls, cfg, src_dict, embed_tokens):
        return SkipTransformerEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg, tgt_dict, embed_tokens):
        return SkipTransformerDecoder(
            cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention
        )


class SkipLanguageModel(SkipModel, TransformerLanguageModel):
    """fairseq's ``transformer_lm`` whose residuals are the skip connections of ``--skip-kind``."""

    kind, config = "transformer_lm", SkipLanguageModelConfig

    @classmethod
    def build_model(cls, cfg, task):
        """Build from a flat config.

        Raises :class:`~fairseq_rskip.errors.UserError` where its options contradict.
        """
        config = checked(cls, cfg)
        # None, or a reference to the task that nobody resolved
        if not isinstance(config.max_target_positions, int):
            config.max_target_positions = config.tokens_per_sample
        if config.decoder.layers_to_keep:
            config.decoder.layers = len(config.decoder.layers_to_keep.split(","))
        config.checkpoint_activations |= config.offload_activations
        check_tied(config)
        embedding = cls.build_embedding(config, task.source_dictionary, config.decoder.input_dim)
        model = cls(
            SkipTransformerDecoder(config, task.target_dictionary, embedding, no_encoder_attn=True)
        )
        return finish(model, task, cfg)

    @classmethod
    def build_embedding(cls, cfg, dictionary, embed_dim, path=None):
        if not cfg.adaptive_input:
            return super().build_embedding(cfg, dictionary, embed_dim, path)
        cutoff = eval_str_list(cfg.adaptive_input_cutoff, type=int)
        noise = cfg.quant_noise
        sizes = (
            len(dictionary),
            dictionary.pad(),
            embed_dim,
            cfg.adaptive_input_factor,
            cfg.decoder.embed_dim,
        )
        return AdaptiveInput(*sizes, cutoff, noise.pq, noise.pq_block_size)


def check_tied(config) -> None:
    """Raise ``UserError`` for --tie-adaptive-weights where input and softmax differ in shape."""
    if not config.tie_adaptive_weights:
        return
    cutoffs = (config.adaptive_input_cutoff, config.adaptive_softmax_cutoff)
    inward, outward = (eval_str_list(cutoff, type=int) for cutoff in cutoffs)
    alike = (
        inward == outward
        and config.adaptive_input_factor == config.adaptive_softmax_factor
        and config.decoder.input_dim == config.decoder.output_dim
    )
    if not config.adaptive_input or not alike:
        raise UserError(
            "--tie-adaptive-weights: expected --adaptive-input with the cutoffs, the factor "
            "and the size of the adaptive softmax"
        )


for _model in (SkipTransformerModel, SkipLanguageModel):
    for _arch, _config in arch_configs(_model.config):
        register(_model, _arch, _config)
