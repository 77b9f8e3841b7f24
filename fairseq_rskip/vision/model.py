"""PreAct-ResNet for 32x32 images (He et al. 2016b, "Identity Mappings in Deep Residual Networks"), with any skip.

Every residual unit computes ``y = skip(shortcut(x), F(x))`` with :class:`fairseq_rskip.residual.SkipConnection`, where
``F`` is BN-ReLU-conv-BN-ReLU-conv. The plain skip (xskip, lambda 1, no norm) gives He et al.'s network. Image maps are
``(batch, channels, height, width)`` throughout; the ``channels_last`` memory format is kept.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..residual import PLAIN, Branch, Place, SkipConnection, Weight
from ..residual.state import upgrade_scalars

STAGES = 3
WIDTH = 16  # channels of the first stage of He et al.'s networks
SHORTCUTS = ("A", "B")


class PadShortcut(nn.Module):
    """Shortcut type A: every ``stride``-th position, zeros in the channels that ``in_width`` lacks; no parameters."""

    def __init__(self, in_width: int, width: int, stride: int):
        super().__init__()
        self.extra = width - in_width
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))


class ScalarBias(nn.Module):
    """``x + b`` with one learned b, 0 at first: where a rule does without batch norm (Zhang et al. 2019, Fixup)."""

    def __init__(self, _width: int = 1):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
        upgrade_scalars(self, state, prefix)
        super()._load_from_state_dict(state, prefix, *arguments)


class PreActBlock(nn.Module):
    """One residual unit, ``(N, in_width, H, W)`` to ``(N, width, H / stride, W / stride)``.

    ``common``: the first BN-ReLU precedes the split, so that the shortcut starts from the activated input, too.
    """

    def __init__(
        self, in_width: int, width: int, stride: int, common: bool, shortcut: str, skip: dict[str, Any], place: Place
    ):
        super().__init__()
        self.common = common
        rule = SkipConnection(width, channel_dim=1, place=place, **skip)
        norm, bias = (ScalarBias, ScalarBias) if rule.replaces_batch_norm else (nn.BatchNorm2d, nn.Identity)
        self.bn1, self.bias1 = norm(in_width), bias()
        self.conv1 = _conv(in_width, width, 3, stride)
        self.bn2, self.bias2 = norm(width), bias()
        self.conv2 = _conv(width, width, 3)
        self.shortcut: nn.Module = nn.Identity()
        if in_width != width or stride != 1:
            pad = shortcut == "A"
            self.shortcut = PadShortcut(in_width, width, stride) if pad else _conv(in_width, width, 1, stride)
        self.skip = rule  # last, as in earlier versions: an optimizer's state goes by the order of the parameters

    def branch(self) -> Branch:
        """The kernels of the branch, with the standard deviations of He's initialisation with the fan-out."""
        kernels = {"conv1": self.conv1.weight, "conv2": self.conv2.weight}
        return {name: Weight(kernel, (2.0 / (9 * kernel.size(0))) ** 0.5) for name, kernel in kernels.items()}

    def forward(self, x: Tensor) -> Tensor:
        activated = self.bias1(F.relu(self.bn1(x), inplace=True))
        # the rule's prepare is left out: a branch begins with norms, or biases, of its own
        branch = self.conv2(self.bias2(F.relu(self.bn2(self.conv1(activated)), inplace=True)))
        return self.skip(self.shortcut(activated if self.common else x), branch)


class PreActResNet(nn.Module):
    """PreAct-ResNet of ``depth`` = 6n+2 layers: three stages of n units, ``width``, twice and four times as wide.

    ``skip`` has the options of ``SkipConnection`` (kind, norm, norm_axes, and the kind's own) for every unit; without
    it the skip is plain. Where the width changes, the shortcut is "A" (strided identity, zero-padded channels) or "B"
    (1x1 convolution). Raises ``ValueError`` for other values, and what ``SkipConnection`` raises.
    """

    def __init__(
        self, depth: int, num_classes: int, skip: dict[str, Any] | None = None, shortcut: str = "A", width: int = WIDTH
    ):
        super().__init__()
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth={depth!r}: expected 6n+2 with n >= 1, for example 20, 32, 44, 56, 110")
        for name, number in (("num_classes", num_classes), ("width", width)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}={number!r}: expected an integer >= 1")
        if shortcut not in SHORTCUTS:
            raise ValueError(f"shortcut={shortcut!r}: expected one of {', '.join(SHORTCUTS)}")
        widths = [width * 2**stage for stage in range(STAGES)]
        self.conv = _conv(3, width, 3)
        blocks, in_width = [], width
        per_stage = (depth - 2) // 6
        for stage, width in enumerate(widths):
            for position in range(per_stage):
                # He et al. 2016b, 4.1: the first unit activates right after the lone convolution, before it splits;
                # units that widen do so in the authors' code
                first = position == 0
                stride = 2 if first and stage > 0 else 1
                place = Place("resnet", "block", stage * per_stage + position, STAGES * per_stage)
                blocks.append(PreActBlock(in_width, width, stride, first, shortcut, dict(skip or PLAIN), place))
                in_width = width
        self.blocks = nn.Sequential(*blocks)
        rule = blocks[0].skip
        self.bn = ScalarBias() if rule.replaces_batch_norm else nn.BatchNorm2d(in_width)
        self.fc = nn.Linear(in_width, num_classes)
        self._initialise(rule.zero_classifier)

    def _initialise(self, zero_classifier: bool) -> None:
        """Initialise convolutions as He et al. do, with the fan-out; the linear layer keeps torch's weights."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)
        if zero_classifier:
            nn.init.zeros_(self.fc.weight)
        for block in self.blocks:
            block.skip.initialise(block.branch())

    def shortcuts(self) -> dict[str, nn.Module]:
        """Return the shortcut of each skip connection where the width changes, by the skip connection's name."""
        found = {f"blocks.{number}.skip": block.shortcut for number, block in enumerate(self.blocks)}
        return {name: shortcut for name, shortcut in found.items() if not isinstance(shortcut, nn.Identity)}

    def forward(self, x: Tensor) -> Tensor:
        """Images ``(N, 3, H, W)`` to logits ``(N, num_classes)``."""
        x = self.blocks(self.conv(x))
        return self.fc(F.relu(self.bn(x), inplace=True).mean((2, 3)))


preact_resnet = PreActResNet


def _conv(in_width: int, width: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_width, width, size, stride, size // 2, bias=False)
