"""Shuffled batches and their augmentation: padded random crop, flip and normalisation in one gather on the device.

The same as torchvision's ``ToTensor``, ``Normalize``, ``RandomCrop``, ``RandomHorizontalFlip``: the padding is 0 after
normalisation, as in fb.resnet.torch, which He et al. used.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Which examples, ``(N,)`` each: the index; the crop's upper left corner in the padded image; whether to flip."""

    index: Tensor
    top: Tensor
    left: Tensor
    flip: Tensor


class BatchStream:
    """Endless batches of exactly ``batch_size``; where a pass over the data ends, the batch continues with the next.

    ``crop`` is the padding in pixels (the corner is uniform in ``0 .. 2 * crop``); ``flip``: flip half of the examples.
    A pass's order and draws are made at its start on the CPU: they are the same on every device and in every process.
    """

    def __init__(self, size: int, batch_size: int, seed: int, crop: int, flip: bool, device: torch.device):
        self.size, self.batch_size, self.crop, self.flip, self.device = size, batch_size, crop, flip, device
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

    def state_dict(self) -> dict[str, Any]:
        """The generator before the current pass was drawn, and the place within the pass."""
        return {"before_pass": self.before_pass, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["before_pass"])
        self._start_pass()
        self.position = int(state["position"])


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel of uint8 ``(N, H, W, C)`` images scaled to 0..1, as fp32 ``(C,)``."""
    channels = images.flatten(0, -2)
    values = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(channels[:, c], minlength=256) for c in range(images.size(-1))]).double().cpu()
    shares = counts / counts.sum(1, keepdim=True)
    mean = shares @ values
    variance = (shares * (values - mean.unsqueeze(1)).square()).sum(1)
    return mean.float(), variance.sqrt().float().clamp(min=1e-3)


class Augmenter:
    """Turns stored images and a batch's draws into the network's input ``(N, C, H, W)``, fp32 and channels_last.

    Stored images are uint8 ``(N, H, W, C)``, on ``device``, all ``shape = (H, W, C)``. Channels are normalised on rows
    of ``W * C`` values: torch's kernels are slow where the innermost dimension has three.
    """

    def __init__(self, shape: Any, mean: Tensor, std: Tensor, crop: int, device: torch.device):
        height, width, self.channels = shape
        self.rows, self.columns = (torch.arange(size, device=device) - crop for size in (height, width))
        scale, shift = 1 / (255 * std.double()), -mean.double() / std.double()
        self.scale, self.shift = (v.float().repeat(width).to(device) for v in (scale, shift))

    def train(self, images: Tensor, batch: Batch) -> Tensor:
        """The batch's images, cropped and flipped as drawn."""
        height, width = images.shape[1:3]
        rows = batch.top.unsqueeze(1) + self.rows
        columns = batch.left.unsqueeze(1) + torch.where(batch.flip.unsqueeze(1), self.columns.flip(0), self.columns)
        inner = rows.clamp(0, height - 1).unsqueeze(2), columns.clamp(0, width - 1).unsqueeze(1)
        taken = images[(batch.index.view(-1, 1, 1), *inner)]
        x = self._normalised(taken)
        inside = ((columns >= 0) & (columns < width)).repeat_interleave(self.channels, 1).unsqueeze(1)
        x = torch.where(((rows >= 0) & (rows < height)).unsqueeze(2) & inside, x, 0.0)
        return x.view(taken.shape).permute(0, 3, 1, 2)

    def test(self, images: Tensor) -> Tensor:
        """``images`` as they are."""
        return self._normalised(images).view(images.shape).permute(0, 3, 1, 2)

    def _normalised(self, images: Tensor) -> Tensor:
        """fp32 ``(N, H, W * C)``."""
        return torch.addcmul(self.shift, images.flatten(2).float(), self.scale)
