"""Data-dependent initialisation, in fp32, when fairseq-train builds the model.

It sets Admin's ω and askip's λ from the gradient. Every process of a training reads the same
sentences on the CPU, so that all start alike. When generating or resuming, the values are in the
checkpoint.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from fairseq.modules import LayerDropModuleList
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from fairseq_rskip.errors import UserError
from fairseq_rskip.residual import initialise_from_batch
from fairseq_rskip.residual.profile import wanting_profile

logger = logging.getLogger(__name__)
TOKENS = 4096  # of source and target, in the profiled batch
WITHOUT_PROFILE = "--skip-omega formula (admin) or another --skip-adapt (askip)"


def is_training_process(task: Any) -> bool:
    """Whether a training of ``task`` can follow.

    fairseq-generate and other commands never import fairseq's trainer.
    """
    return "fairseq.trainer" in sys.modules and hasattr(task, "load_dataset")


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether --ddp-backend fully_sharded has flattened parameters of ``model``, or will do so.

    fairseq builds a model in the context in which fairscale wraps its parts, and wraps the whole
    when it is built.
    """
    wrapping = sys.modules.get("fairscale.nn.wrap.auto_wrap")
    if wrapping is not None and wrapping.ConfigAutoWrap.in_autowrap_context:
        return True
    return any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())


def profile(task: Any, model: nn.Module) -> None:
    """Profile the skip connections of ``model`` that want it, where a training can follow.

    None can without the training data: such a model is loaded, with the values of its checkpoint.
    Raises :class:`~fairseq_rskip.errors.UserError` for data without a sentence to profile, or
    where the model is sharded.
    """
    wanting = list(wanting_profile(model).values())
    if not is_training_process(task) or not wanting:
        return
    if is_fully_sharded(model):
        raise UserError(
            f"--skip-kind {wanting[0].kind} cannot be profiled under --ddp-backend fully_sharded: "
            f"expected another backend, or {WITHOUT_PROFILE}"
        )
    try:
        sample = first_batch(task, model)
    except FileNotFoundError:
        return
    with _every_layer(model):
        values = initialise_from_batch(model, lambda: token_loss(model, sample))
    logger.info(f"profiled {len(values)} skip connections on {sample['ntokens']} target tokens")
    listed = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
    logger.info(f"initial values from the profile: {listed}")


@contextlib.contextmanager
def _every_layer(model: nn.Module) -> Iterator[None]:
    """Without LayerDrop: a layer left out would not be profiled."""
    stacks = [
        (module, module.p) for module in model.modules() if isinstance(module, LayerDropModuleList)
    ]
    try:
        for stack, _ in stacks:
            stack.p = 0.0
        yield
    finally:
        for stack, p in stacks:
            stack.p = p


def training_subset(task: Any) -> str:
    """fairseq-train's --train-subset, which some tasks hold themselves; "train" if none is set."""
    options = getattr(task, "cfg", None) or getattr(task, "args", None)
    subset = getattr(options, "train_subset", None)
    if subset is None and isinstance(options, DictConfig):
        subset = OmegaConf.select(options._get_root(), "dataset.train_subset")
    return subset or "train"


def first_batch(task: Any, model: Any) -> Any:
    """The first sentences of the training set, up to :data:`TOKENS`, as the task batches them.

    Those that are longer than the model's positions are left out, as in training. Raises
    ``UserError`` where none is left, or their entries are not "source" and "target";
    ``FileNotFoundError`` without data.
    """
    limits = model.max_positions()
    if not isinstance(limits, tuple):
        limits = (limits,)
    loaded = dict(task.datasets)
    try:
        subset = training_subset(task)
        task.load_dataset(subset, epoch=1, combine=False)
        data = task.dataset(subset)
        sentences: list[Any] = []
        tokens = 0
        for number in range(len(data)):
            if tokens >= TOKENS:
                break
            pair = data[number]
            sides = (pair["source"], pair["target"])
            if all(len(side) <= limit for side, limit in zip(sides, limits)):
                sentences.append(pair)
                tokens += sum(map(len, sides))
        if not sentences:
            raise UserError(f"no training example is within the model's {limits} positions")
        return data.collater(sentences)
    except (KeyError, AttributeError, TypeError) as error:
        raise UserError(
            "--skip-omega profile and --skip-adapt gradient need the training data, "
            f"which cannot be read ({error}): expected {WITHOUT_PROFILE}"
        ) from None
    finally:
        task.datasets.clear()
        task.datasets.update(loaded)


def token_loss(model: nn.Module, sample: Any) -> Tensor:
    """Cross entropy per target token of ``sample``."""
    scores = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True, sample=sample)
    padding = model.decoder.padding_idx
    return F.nll_loss(
        scores.flatten(0, 1).float(), sample["target"].flatten(), ignore_index=padding
    )
