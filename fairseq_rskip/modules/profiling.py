"""Admin's profile, in process, when fairseq-train builds the model: one batch, fp32, no gradients.

Every process of a training reads the same sentences on the CPU, so that all start alike. When generating, or resuming,
the profile is in the checkpoint.
"""

import logging
import sys
from typing import Any

from torch import nn

from fairseq_rskip.errors import UserError
from fairseq_rskip.residual import SkipConnection
from fairseq_rskip.residual.profile import profile

logger = logging.getLogger(__name__)
TOKENS = 4096  # of source and target, in the profiled batch


def profile_starts(task: Any, model: nn.Module) -> None:
    """Profile the skip connections of ``model`` that want it, where a training can follow.

    fairseq-generate and its kin, which never import fairseq's trainer, profile nothing. Raises
    :class:`~fairseq_rskip.errors.UserError` without training data, or where the model is sharded.
    """
    skips = [module for module in model.modules() if isinstance(module, SkipConnection)]
    if "fairseq.trainer" not in sys.modules or not any(skip.wants_profile() for skip in skips):
        return
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise UserError(f"--skip-kind {skips[0].kind} cannot be profiled under --ddp-backend fully_sharded: expected "
                        "another backend, or --skip-omega formula")
    sample = first_batch(task)
    found = profile(model, lambda: model(**sample["net_input"]))
    values = list(found.values())
    logger.info(f"profiled {len(values)} skip connections on {sample['ntokens']} target tokens, ω ≤ {max(values):.3g}")


def first_batch(task: Any) -> Any:
    """The first sentences of the training set, as many as make :data:`TOKENS`, as the task's collater batches them."""
    loaded = dict(task.datasets)
    try:
        task.load_dataset("train", epoch=1, combine=False)
        data = task.dataset("train")
        taken, tokens = [], 0
        while len(taken) < len(data) and tokens < TOKENS:
            taken.append(data[len(taken)])
            tokens += sum(len(part) for part in (taken[-1]["source"], taken[-1]["target"]))
        return data.collater(taken)
    except (FileNotFoundError, KeyError, AttributeError) as error:
        raise UserError(f"--skip-omega profile needs the training data, which cannot be read ({error}): prepare it, or "
                        "choose --skip-omega formula") from None
    finally:
        task.datasets.clear()
        task.datasets.update(loaded)
