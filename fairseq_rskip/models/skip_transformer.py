"""``transformer_<variant><size>``: the Transformer whose every residual is a skip connection of the paper."""

import logging

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import MODEL_DATACLASS_REGISTRY, register_model, register_model_architecture
from fairseq.models.transformer import TransformerModelBase
from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import OmegaConf

from fairseq_rskip.errors import UserError
from fairseq_rskip.models._presets import SkipTransformerConfig, architectures, resolve
from fairseq_rskip.modules import fixnorm, skip_log, training
from fairseq_rskip.modules.profiling import profile_starts
from fairseq_rskip.modules.skip_config import check_heads
from fairseq_rskip.modules.transformer import SkipTransformerDecoder, SkipTransformerEncoder
from fairseq_rskip.modules.upgrade import check_rule
from fairseq_rskip.residual import Weight, skips
from fairseq_rskip.residual.adaptive import costs_of_halting
from fairseq_rskip.residual.state import WithRule

logger = logging.getLogger(__name__)


class SkipTransformerModel(WithRule, TransformerModelBase):
    """Transformer (Vaswani et al. 2017) with the skip connections of Liu et al., COLING 2020, equations 2 to 4.

    One subclass is registered for each architecture, with a config whose defaults are the architecture's.
    """

    @classmethod
    def add_args(cls, parser):
        """Add the options to ``parser``. All architectures share the flags: a default of True (the shared embeddings of
        ``_iwslt_en_vi``) must not turn ``--share-all-embeddings`` into a switch that turns it off."""
        gen_parser_from_dataclass(parser, SkipTransformerConfig(), delete_default=True)

    @classmethod
    def build_model(cls, cfg, task):
        """Build from a flat config. Raises :class:`~fairseq_rskip.errors.UserError` where its options contradict."""
        arch = getattr(cfg, "_name", None) or cls.__name__
        skip_log.check_interval(cfg.skip_log_interval)
        config = resolve(cfg)
        skip = config.skip.check(arch, pre_norm=config.encoder.normalize_before or config.decoder.normalize_before)
        config.skip.check_layers(arch, config)
        for name in ("encoder", "decoder"):
            side = getattr(config, name)
            check_heads(name, side.embed_dim, side.attention_heads)
            if side.ffn_embed_dim < 1:
                raise UserError(f"--{name}-ffn-embed-dim {side.ffn_embed_dim}: expected an integer >= 1")
        if config.checkpoint_activations and costs_of_halting(skip):
            raise UserError(
                f"--arch {arch} with --checkpoint-activations: what halting costs would have no gradient there, "
                "expected --skip-halt-cost 0"
            )
        fixnorm.check(arch, config)
        if config.share_all_embeddings and task.source_dictionary != task.target_dictionary:
            raise UserError(
                f"--arch {arch} shares all embeddings, and the two dictionaries differ: preprocess with "
                "--joined-dictionary, or choose an architecture that does not share them (Base: no suffix)"
            )
        model = super().build_model(config, task)
        counts = (len(skips(side)) for side in (model.encoder, model.decoder))
        warning = config.skip.growth_warning(skip, *counts)
        if warning:
            logger.warning(warning)
        _scale_embeddings(model)
        profile_starts(task, model)
        training.attach(task, model, cfg.skip_log_interval)
        return model

    def rule(self):
        """What a checkpoint's parameters fit beside the skip connections, and must not: FixNorm has none of its own."""
        return {"kind": "transformer", "fix_norm": bool(self.cfg.fix_norm)}

    def upgrade_state_dict_named(self, state_dict, name):
        """Raises :class:`~fairseq_rskip.errors.UserError`, too, for a checkpoint of another rule."""
        super().upgrade_state_dict_named(state_dict, name)
        check_rule(state_dict, name, self)

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


def _scale_embeddings(model) -> None:
    """Let the rule scale what each side's embedding starts with; one that both share once, as the encoder's."""
    scaled = set()
    for side in (model.encoder, model.decoder):
        weight = getattr(side.embed_tokens, "weight", None)
        if weight is not None and weight not in scaled:
            scaled.add(weight)
            for skip in list(skips(side).values())[:1]:
                skip.initialise({"embedding": Weight(weight, weight.size(1) ** -0.5)})


class _Node(ConfigNode):
    """hydra's entry for an architecture, whose config is made when it is asked for: making one takes 7 ms."""

    def __init__(self, arch, config):
        self.name, self.group, self.package, self.provider = f"{arch}.yaml", "model", None, "fairseq"
        self.config = config

    def __getattr__(self, name):
        if name != "node":
            raise AttributeError(name)
        values = self.config()
        values._name = self.name[: -len(".yaml")]
        self.node = OmegaConf.structured(values)
        return self.node


def _register(arch, config) -> None:
    """What ``register_model(arch, dataclass=config)`` does, without making the config."""
    model = type(arch, (SkipTransformerModel,), {"__doc__": SkipTransformerModel.__doc__})
    register_model(arch)(model)
    setattr(model, "__dataclass", config)  # noqa: B010 (fairseq's name for it, which the decorator has set to None)
    MODEL_DATACLASS_REGISTRY[arch] = config
    register_model_architecture(arch, arch)(lambda _: None)
    ConfigStore.instance().repo.setdefault("model", {})[f"{arch}.yaml"] = _Node(arch, config)


for _arch, _config in architectures():
    _register(_arch, _config)
