"""The common parts of all architectures: registration, checks of options, steps after building."""

import dataclasses
import logging

import torch
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import (
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    register_model,
    register_model_architecture,
)
from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import OmegaConf
from torch import nn

from fairseq_rskip.errors import UserError
from fairseq_rskip.machine import keep_freed_memory
from fairseq_rskip.models.flat_config import resolve
from fairseq_rskip.modules import fixnorm, step_hooks
from fairseq_rskip.modules.fp16_range import growth
from fairseq_rskip.modules.profiling import is_fully_sharded, profile
from fairseq_rskip.modules.skip_config import check_sizes
from fairseq_rskip.modules.upgrade import check_rule
from fairseq_rskip.option_error import refused
from fairseq_rskip.parameters import check_lr_scale
from fairseq_rskip.residual import Place, Weight, skips
from fairseq_rskip.residual.halting import halting_modules
from fairseq_rskip.residual.state import WithRule

logger = logging.getLogger(__name__)


class SkipModel(WithRule):
    """A fairseq model over skip connections.

    A subclass is registered for each architecture, with a config whose defaults are the
    architecture's.
    """

    kind, config = "", None  # the flat config has every option

    @classmethod
    def add_args(cls, parser):
        """Add the options to ``parser``.

        All architectures share the flags: a default of True (the shared embeddings of
        ``_iwslt_en_vi``) must not turn ``--share-all-embeddings`` into a switch that turns it off.
        """
        gen_parser_from_dataclass(parser, cls.config(), delete_default=True)

    @classmethod
    def build_embedding(cls, cfg, dictionary, embed_dim, path=None):
        embedding = super().build_embedding(cfg, dictionary, embed_dim, path)
        return fixnorm.UnitEmbedding(embedding) if cfg.fix_norm else embedding

    def rule(self):
        """The model's kind, and whether its embeddings have unit length."""
        return {"kind": self.kind, "fix_norm": bool(self.decoder.cfg.fix_norm)}

    def upgrade_state_dict_named(self, state_dict, name):
        """Raise :class:`~fairseq_rskip.errors.UserError` for a checkpoint of another rule."""
        super().upgrade_state_dict_named(state_dict, name)
        check_rule(state_dict, name, self)


def stacks(model) -> dict:
    """The model's encoder and decoder, or its decoder alone, by name."""
    return {name: getattr(model, name) for name in ("encoder", "decoder") if hasattr(model, name)}


def checked(model_class, cfg):
    """fairseq's nested config of the flat ``cfg``.

    Raises :class:`~fairseq_rskip.errors.UserError` where its options contradict each other.
    """
    arch = getattr(cfg, "_name", None) or model_class.__name__
    if cfg.skip_log_interval < 0:
        raise refused("skip-log-interval", cfg.skip_log_interval, "an integer >= 0")
    config = resolve(cfg, model_class.config)
    sides = {name: getattr(config, name) for name in config.sides}
    depth = max(1, *(side.layers for side in sides.values()))
    pre_norm_sides = [name for name, side in sides.items() if side.normalize_before]
    pre_norm = f"{pre_norm_sides[0]}-normalize-before" if pre_norm_sides else ""
    other_depth = 1 if len(sides) > 1 else 0  # only whether there is another side matters here
    place = Place(list(sides)[-1], index=0, depth=depth, other_depth=other_depth)
    skip = config.skip.check(arch, place, pre_norm)
    # the norms of some kinds depend on the layer
    config.skip.check(arch, dataclasses.replace(place, index=depth - 1), pre_norm)
    config.skip.check_layers(arch, sides)
    for name, side in sides.items():
        check_sizes(name, side)
    if (config.checkpoint_activations or config.offload_activations) and halting_modules(skip):
        raise UserError(
            f"--arch {arch} with --checkpoint-activations or --offload-activations: "
            "what halting costs would have no gradient there, expected --skip-halt-cost 0"
        )
    fixnorm.check(arch, config, skip)
    return config


def finish(model, task, cfg):
    """Prepare a model that was built for its training; returns ``model``.

    Warn if the stream grows, set the initial values that the rule scales or takes from a batch, and
    make ``task`` log and report. From here on the process keeps freed memory if it has no GPU, and
    takes no attention of cuDNN if it has one.
    """
    if not is_fully_sharded(model):  # which hides what the rules learn, and refuses every scale
        check_lr_scale(model, cfg.skip_lr_scale)
    if torch.cuda.is_available():
        # cuDNN plans its attention again for each shape, 7 ms a call, and every batch of text has
        # another shape: a small model trained a third as fast (docs/gpu.md)
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        keep_freed_memory()
    level, text = growth(
        {name: list(skips(stack).values()) for name, stack in stacks(model).items()}
    )
    if text:
        logger.log(level, text)
    _scale_embeddings(model)
    _zero_classifier(model)
    profile(task, model)
    step_hooks.attach(task, model, cfg.skip_log_interval, cfg.skip_lr_scale)
    return model


def _scale_embeddings(model) -> None:
    """Let the rule scale each stack's initial embedding.

    A shared embedding is scaled once, as the encoder's.
    """
    scaled = set()
    for stack in stacks(model).values():
        weight = getattr(stack.embed_tokens, "weight", None)
        if weight is not None and weight not in scaled:
            scaled.add(weight)
            for skip in list(skips(stack).values())[:1]:
                skip.initialise({"embedding": Weight(weight, weight.size(1) ** -0.5)})


def _zero_classifier(model) -> None:
    """Start an output matrix that is not the embedding at 0, where the rule has it so."""
    output = model.decoder.output_projection
    embedding = getattr(model.decoder.embed_tokens, "weight", None)
    starts_at_zero = any(skip.zero_classifier for skip in skips(model.decoder).values())
    if starts_at_zero and output is not None and output.weight is not embedding:
        nn.init.zeros_(output.weight)


class _Node(ConfigNode):
    """hydra's entry for an architecture, whose config is made when it is read: that takes 7 ms."""

    def __init__(self, arch, config):
        self.name = f"{arch}.yaml"
        self.group = "model"
        self.package = None
        self.provider = "fairseq"
        self.config = config

    def __getattr__(self, name):
        if name != "node":
            raise AttributeError(name)
        values = self.config()
        values._name = self.name[: -len(".yaml")]
        self.node = OmegaConf.structured(values)
        return self.node


def __getattr__(name: str) -> type:
    """An architecture's class by its name, where ``pickle`` looks for it."""
    if name in ARCH_MODEL_REGISTRY:
        return ARCH_MODEL_REGISTRY[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(model_class, arch, config) -> None:
    """Register a subclass of ``model_class`` as ``arch``, without making its config.

    This is what ``register_model(arch, dataclass=config)`` does.
    """
    model = type(arch, (model_class,), {"__doc__": model_class.__doc__})
    register_model(arch)(model)
    setattr(model, "__dataclass", config)  # noqa: B010 (fairseq's name for it, which the decorator has set to None)
    MODEL_DATACLASS_REGISTRY[arch] = config
    register_model_architecture(arch, arch)(lambda _: None)
    ConfigStore.instance().repo.setdefault("model", {})[f"{arch}.yaml"] = _Node(arch, config)
