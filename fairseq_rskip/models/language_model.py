"""``transformer_lm_<variant><size>``: the decoder alone, as a language model (``--task language_modeling``)."""

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.modules import AdaptiveInput
from fairseq.options import eval_str_list

from fairseq_rskip.models._building import SkipModel, checked, finish, register
from fairseq_rskip.models._presets import SkipLanguageModelConfig, architectures
from fairseq_rskip.modules import fixnorm
from fairseq_rskip.modules.transformer import SkipTransformerDecoder


class SkipLanguageModel(SkipModel, TransformerLanguageModel):
    """fairseq's ``transformer_lm`` with the skip connections of Liu et al., COLING 2020, equations 2 to 4."""

    kind = "transformer_lm"

    @classmethod
    def add_args(cls, parser):
        """Add the options to ``parser``; a default of True must not turn a switch into one that turns it off."""
        gen_parser_from_dataclass(parser, SkipLanguageModelConfig(), delete_default=True)

    @classmethod
    def build_model(cls, cfg, task):
        """Build from a flat config. Raises :class:`~fairseq_rskip.errors.UserError` where its options contradict."""
        config = checked(cls, cfg, SkipLanguageModelConfig)
        if not isinstance(config.max_target_positions, int):  # None, or a reference to the task that nobody resolved
            config.max_target_positions = config.tokens_per_sample
        if config.decoder.layers_to_keep:
            config.decoder.layers = len(config.decoder.layers_to_keep.split(","))
        config.checkpoint_activations |= config.offload_activations
        embedding = cls.build_embedding(config, task.source_dictionary, config.decoder.input_dim)
        model = cls(SkipTransformerDecoder(config, task.target_dictionary, embedding, no_encoder_attn=True))
        finish(model, task, cfg.skip_log_interval)
        return model

    @classmethod
    def build_embedding(cls, cfg, dictionary, embed_dim, path=None):
        if cfg.adaptive_input:
            cutoff, noise = eval_str_list(cfg.adaptive_input_cutoff, type=int), cfg.quant_noise
            sizes = (len(dictionary), dictionary.pad(), embed_dim, cfg.adaptive_input_factor, cfg.decoder.embed_dim)
            return AdaptiveInput(*sizes, cutoff, noise.pq, noise.pq_block_size)
        embedding = super().build_embedding(cfg, dictionary, embed_dim, path)
        return fixnorm.UnitEmbedding(embedding) if cfg.fix_norm else embedding


for _arch, _config in architectures(SkipLanguageModelConfig):
    register(SkipLanguageModel, _arch, _config)
