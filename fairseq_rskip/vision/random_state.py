"""The global generators of random numbers: seeding them, and their state as plain values for a checkpoint."""

import random
from typing import Any, Dict

import torch


def _numpy_random() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy.random


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch, on every device."""
    random.seed(seed)
    torch.manual_seed(seed)
    if _numpy_random() is not None:
        _numpy_random().seed(seed % 2**32)


def capture(device: torch.device) -> Dict[str, Any]:
    """Their state, as tensors and plain containers."""
    version, words, gauss = random.getstate()
    state: Dict[str, Any] = {"python": [version, list(words), gauss], "torch": torch.get_rng_state()}
    if _numpy_random() is not None:
        name, keys, *rest = _numpy_random().get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: Dict[str, Any], device: torch.device) -> None:
    """Put them back to what ``capture`` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and _numpy_random() is not None:
        _numpy_random().set_state(tuple(state["numpy"]))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
