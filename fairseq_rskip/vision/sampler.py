"""Shuffled batches of indices, and the augmentation's draws that go with them, from one generator.

A pass's order and draws are made at its start, on the CPU, from a generator of their own: they are the same on every
device and in every process, and cost a training step nothing but a slice.
"""

from typing import Any, Dict, NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Which examples, ``(N,)`` each: the index; the crop's upper left corner in the padded image; whether to flip."""

    index: Tensor
    top: Tensor
    left: Tensor
    flip: Tensor


class BatchStream:
    """Endless batches of exactly ``batch_size``; where a pass over the data ends, the batch goes on with the next.

    So ``iterations * batch_size`` examples are what a run sees. ``crop`` is the number of padded pixels a side (the
    corner is uniform in ``0 .. 2 * crop``); ``flip`` whether half of the examples are flipped.
    """

    def __init__(self, size: int, batch_size: int, seed: int, crop: int, flip: bool, device: torch.device):
        self.size, self.batch_size = size, batch_size
        self.crop, self.flip = crop, flip
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)
        self._start_pass()

    def _start_pass(self) -> None:
        self.before_pass = self.generator.get_state()
        self.position = 0
        draw = self.generator
        order = torch.randperm(self.size, generator=draw)
        top = torch.randint(2 * self.crop + 1, (self.size,), generator=draw)
        left = torch.randint(2 * self.crop + 1, (self.size,), generator=draw)
        flip = torch.rand(self.size, generator=draw) < (0.5 if self.flip else 0.0)
        self.plan = Batch(*(part.to(self.device) for part in (order, top, left, flip)))

    def next(self) -> Batch:
        """The next batch."""
        parts, missing = [], self.batch_size
        while missing:
            if self.position == self.size:
                self._start_pass()
            end = min(self.position + missing, self.size)
            parts.append([part[self.position : end] for part in self.plan])
            missing -= end - self.position
            self.position = end
        return Batch(*(pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in zip(*parts)))

    def state_dict(self) -> Dict[str, Any]:
        """The generator before the current pass was drawn, and the place within the pass."""
        return {"before_pass": self.before_pass, "position": self.position}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.generator.set_state(state["before_pass"])
        self._start_pass()
        self.position = int(state["position"])
