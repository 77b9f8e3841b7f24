"""``transformer_<variant><size>``: the Transformer whose every residual is a skip connection of the paper."""

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.transformer import TransformerModelBase

from fairseq_rskip.errors import UserError
from fairseq_rskip.models._building import SkipModel, checked, finish, register
from fairseq_rskip.models._presets import SkipTransformerConfig, architectures
from fairseq_rskip.modules import fixnorm
from fairseq_rskip.modules.transformer import SkipTransformerDecoder, SkipTransformerEncoder


class SkipTransformerModel(SkipModel, TransformerModelBase):
    """Transformer (Vaswani et al. 2017) with the skip connections of Liu et al., COLING 2020, equations 2 to 4."""

    kind = "transformer"

    @classmethod
    def add_args(cls, parser):
        """Add the options to ``parser``. All architectures share the flags: a default of True (the shared embeddings of
        ``_iwslt_en_vi``) must not turn ``--share-all-embeddings`` into a switch that turns it off."""
        gen_parser_from_dataclass(parser, SkipTransformerConfig(), delete_default=True)

    @classmethod
    def build_model(cls, cfg, task):
        """Build from a flat config. Raises :class:`~fairseq_rskip.errors.UserError` where its options contradict."""
        config = checked(cls, cfg, SkipTransformerConfig)
        if config.share_all_embeddings and task.source_dictionary != task.target_dictionary:
            raise UserError(
                f"--arch {getattr(cfg, '_name', None) or cls.__name__} shares all embeddings, and the two dictionaries "
                "differ: preprocess with --joined-dictionary, or choose an architecture that does not share them "
                "(Base: no suffix)"
            )
        model = super().build_model(config, task)
        finish(model, task, cfg.skip_log_interval)
        return model

    @classmethod
    def build_embedding(cls, cfg, dictionary, embed_dim, path=None):
        embedding = super().build_embedding(cfg, dictionary, embed_dim, path)
        return fixnorm.UnitEmbedding(embedding) if cfg.fix_norm else embedding

    @classmethod
    def build_encoder(cls, cfg, src_dict, embed_tokens):
        return SkipTransformerEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg, tgt_dict, embed_tokens):
        return SkipTransformerDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)


for _arch, _config in architectures(SkipTransformerConfig):
    register(SkipTransformerModel, _arch, _config)
