"""An exported image classifier: the PreAct-ResNet with what its input needs."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..vision.image_files import SIZE
from ..vision.model import PreActResNet
from . import fill


class Classifier(PreActResNet):
    """A trained PreAct-ResNet in evaluation mode; ``model(model.preprocess(images))`` are logits
    ``(N, classes)``.

    classes: their names, in the order of the logits
    mean, std: of the training images' channels, scaled to 0..1, ``(3,)``
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: dict[str, Any]):
        super().__init__(
            config["depth"],
            len(config["classes"]),
            config["skip"],
            config["shortcut"],
            config["width"],
        )
        self.classes = tuple(config["classes"])
        self.register_buffer("mean", torch.tensor(config["mean"]), persistent=False)
        self.register_buffer("std", torch.tensor(config["std"]), persistent=False)

    def preprocess(self, images: Tensor) -> Tensor:
        """The network's input ``(N, 3, 32, 32)``, of uint8 images ``(N, 32, 32, 3)``: normalised as
        in training.

        An array of numpy is taken, too. Raises ``UserError`` for images of another type or size.
        """
        images = torch.as_tensor(images)
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1:] != (SIZE, SIZE, 3):
            raise UserError(
                f"images of {images.dtype} {tuple(images.shape)}: "
                f"expected uint8 (N, {SIZE}, {SIZE}, 3)"
            )
        scale = 1 / (255 * self.std.double())
        shift = -self.mean.double() / self.std.double()
        x = torch.addcmul(shift.float(), images.to(self.mean.device).float(), scale.float())
        return x.permute(0, 3, 1, 2).to(next(self.parameters()).dtype)

    @torch.no_grad()
    def classify(self, images: Tensor) -> list[str]:
        """The name of the class of each of ``images``, uint8 ``(N, 32, 32, 3)``. Raises as
        ``preprocess``.
        """
        numbers = self(self.preprocess(images)).argmax(1).tolist()
        return [self.classes[number] for number in numbers]


def load(folder: Path, config: dict[str, Any]) -> Classifier:
    """The classifier that ``config`` describes, with the weights in ``folder``. Raises
    ``UserError``.
    """
    return fill(lambda: Classifier(config), config["depth"], folder).to(
        memory_format=torch.channels_last
    )
