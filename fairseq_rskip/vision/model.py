"""PreAct-ResNet for 32x32 images, with any skip connection.

He et al. 2016b, "Identity Mappings in Deep Residual Networks". Every residual unit computes
``y = skip(shortcut(x), F(x))`` with :class:`fairseq_rskip.residual.SkipConnection`, where ``F`` is
BN-ReLU-conv-BN-ReLU-conv. The plain skip (xskip, lambda 1, no norm) gives He et al.'s network.
Image maps are ``(batch, channels, height, width)`` throughout; the ``channels_last`` memory format
is kept.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..option_error import OptionError
from ..residual import PLAIN, BranchWeights, Place, Weight, create_skip

STAGES = 3
WIDTH = 16  # channels of the first stage of He et al.'s networks
SHORTCUTS = ("A", "B")


class PadShortcut(nn.Module):
    """Shortcut type A, without parameters.

    It takes every ``stride``-th position and pads ``in_width`` channels with zeros to ``width``.
    """

    def __init__(self, in_width: int, width: int, stride: int):
        super().__init__()
        self.extra = width - in_width
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))


class ScalarBias(nn.Module):
    """``x + b`` with one learned b, initially 0, for rules that replace batch norm.

    Source: Zhang et al. 2019, Fixup.
    """

    def __init__(self, _width: int = 1):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class PreActBlock(nn.Module):
    """One residual unit, ``(N, in_width, H, W)`` to ``(N, width, H / stride, W / stride)``.

    ``common``: the first BN-ReLU precedes the split, so that the shortcut's input is activated,
    too.
    """

    def __init__(
        self,
        in_width: int,
        width: int,
        stride: int,
        common: bool,
        shortcut: str,
        skip: Mapping[str, Any],
        place: Place,
    ):
        super().__init__()
        self.common = common
        rule = create_skip(dim=width, channel_dim=1, place=place, **skip)
        if rule.pre is not None:
            reason = "the branches of a ResNet begin with a norm of their own"
            raise OptionError("pre_norm", True, "no pre-norm", reason=reason)
        norm: Any = ScalarBias if rule.replaces_batch_norm else nn.BatchNorm2d
        bias: Any = ScalarBias if rule.replaces_batch_norm else nn.Identity
        self.bn1 = norm(in_width)
        self.bias1 = bias()
        self.conv1 = _conv(in_width, width, 3, stride)
        self.bn2 = norm(width)
        self.bias2 = bias()
        self.conv2 = _conv(width, width, 3)
        self.shortcut = _shortcut(in_width, width, stride, shortcut)
        self.skip = rule

    def branch_weights(self) -> BranchWeights:
        """Return the kernels of the branch and their standard deviations at initialisation.

        The deviations are those of He's initialisation with the fan-out.
        """
        branch = {}
        for name, conv in (("conv1", self.conv1), ("conv2", self.conv2)):
            fan_out = 9 * conv.out_channels
            branch[name] = Weight(conv.weight, (2.0 / fan_out) ** 0.5)
        return branch

    def forward(self, x: Tensor) -> Tensor:
        activated = self.bias1(F.relu(self.bn1(x), inplace=True))
        # skip.prepare is not called: the branch begins with norms, or biases, of its own
        hidden = self.conv1(activated)
        hidden = self.bias2(F.relu(self.bn2(hidden), inplace=True))
        branch = self.conv2(hidden)
        shortcut = self.shortcut(activated if self.common else x)
        return self.skip(shortcut, branch)


class PreActResNet(nn.Module):
    """PreAct-ResNet of ``depth`` = 6n+2 layers, for images ``(N, 3, H, W)``.

    It has three stages of n units, whose widths are ``width``, twice and four times ``width``.
    ``skip`` has the options of ``create_skip`` (kind, norm, norm_axes, and the kind's own) for
    every unit; without it the skip is plain. Where the width changes, the shortcut is "A" (strided
    identity, zero-padded channels) or "B" (1x1 convolution). Raises ``ValueError`` for other
    values, and what ``create_skip`` raises.
    """

    def __init__(
        self,
        depth: int,
        num_classes: int,
        skip: Mapping[str, Any] | None = None,
        shortcut: str = "A",
        width: int = WIDTH,
    ):
        super().__init__()
        _check_sizes(depth, num_classes, width)
        if shortcut not in SHORTCUTS:
            raise ValueError(f"shortcut={shortcut!r}: expected one of {', '.join(SHORTCUTS)}")

        skip = PLAIN if skip is None else skip
        if not isinstance(skip, Mapping) or "kind" not in skip:
            raise ValueError(
                f"skip={skip!r}: expected a mapping with the kind and its options, such as "
                "{'kind': 'rskip', 'skip_lambda': 2}"
            )
        per_stage = (depth - 2) // 6
        blocks = []
        in_width = width
        self.conv = _conv(3, width, 3)
        for index in range(STAGES * per_stage):
            stage, position = divmod(index, per_stage)
            out_width = width * 2**stage
            # He et al. 2016b, 4.1: the first unit activates right after the first convolution,
            # before it splits; in the authors' code, units that widen do so, too.
            first = position == 0
            stride = 2 if first and stage > 0 else 1
            place = Place("resnet", "block", index, STAGES * per_stage)
            block = PreActBlock(in_width, out_width, stride, first, shortcut, skip, place)
            blocks.append(block)
            in_width = out_width
        self.blocks = nn.Sequential(*blocks)

        rule = blocks[0].skip
        self.bn = ScalarBias() if rule.replaces_batch_norm else nn.BatchNorm2d(in_width)
        self.fc = nn.Linear(in_width, num_classes)
        self._initialise(rule.zero_classifier)

    def _initialise(self, zero_classifier: bool) -> None:
        """Initialise convolutions as He et al. do, with the fan-out.

        The linear layer keeps torch's weights, or gets zeros.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)
        if zero_classifier:
            nn.init.zeros_(self.fc.weight)
        for block in self.blocks:
            block.skip.initialise(block.branch_weights())

    def shortcuts(self) -> dict[str, nn.Module]:
        """Return the shortcuts where the width changes, by the name of their skip connection."""
        shortcuts = {}
        for number, block in enumerate(self.blocks):
            if not isinstance(block.shortcut, nn.Identity):
                shortcuts[f"blocks.{number}.skip"] = block.shortcut
        return shortcuts

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(N, 3, H, W)`` to logits ``(N, num_classes)``."""
        x = self.blocks(self.conv(x))
        return self.fc(F.relu(self.bn(x), inplace=True).mean((2, 3)))


def _check_sizes(depth: int, num_classes: int, width: int) -> None:
    """Raise ``ValueError`` for a number that no network has."""
    is_integer = isinstance(depth, int) and not isinstance(depth, bool)
    if not is_integer or depth < 8 or depth % 6 != 2:
        raise ValueError(
            f"depth={depth!r}: expected 6n+2 with n >= 1, for example 20, 32, 44, 56, 110"
        )
    for name, number in (("num_classes", num_classes), ("width", width)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}={number!r}: expected an integer >= 1")


def _shortcut(in_width: int, width: int, stride: int, kind: str) -> nn.Module:
    """Return the shortcut of one unit: the identity, or ``kind`` where the shape changes."""
    if in_width == width and stride == 1:
        return nn.Identity()
    if kind == "A":
        return PadShortcut(in_width, width, stride)
    return _conv(in_width, width, 1, stride)


def _conv(in_width: int, width: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_width, width, size, stride, size // 2, bias=False)
