"""The image sets that ``--data`` names, as tensors in memory."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from .config import FOLDER, Config
from .imagefolder import load_image_folder

TEST_EVERY = 5  # every fifth digit is for testing


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """Images are uint8 ``(N, 32, 32, 3)``, labels int64 ``(N,)``; ``may_flip``: mirrored images keep their class.

    The validation images are those that ``--valid-images`` holds out of the training images; None without it.
    """

    classes: tuple[str, ...]
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    may_flip: bool = True
    valid_images: Tensor | None = None
    valid_labels: Tensor | None = None

    def to(self, device: torch.device) -> "ImageSet":
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **moved)

    def digest(self) -> str:
        """SHA-256 of all images and labels."""
        digest = hashlib.sha256()
        for split in ("train", "test", "valid"):
            for part in (getattr(self, f"{split}_images"), getattr(self, f"{split}_labels")):
                if part is not None:
                    digest.update(str(tuple(part.shape)).encode())
                    digest.update(part.cpu().contiguous().numpy())
        return digest.hexdigest()

    def identity(self) -> dict[str, Any]:
        """What must be equal for a run to resume with these images, in words."""
        counts = {"training images": len(self.train_labels), "test images": len(self.test_labels)}
        return {"classes": ", ".join(self.classes[:100]), **counts, "SHA-256 of images and labels": self.digest()}


def load(config: Config) -> ImageSet:
    """The image set of ``config.data``, split and reduced as ``config`` says. Raises ``UserError``."""
    if config.data.startswith(FOLDER):
        folder = Path(config.data[len(FOLDER) :]).expanduser()
        images = ImageSet(**load_image_folder(folder, Path(config.cache).expanduser()))
    elif config.data == "digits":
        images = _digits()
    else:
        images = _cifar(config.data, Path(config.data_dir).expanduser())
    if config.valid_images:
        chosen = _balanced(images, config.valid_images, "--valid-images", left=1)
        rest = torch.ones(len(images.train_labels), dtype=torch.bool).index_fill(0, chosen, False)
        valid = _chosen(images, chosen, "valid")
        images = dataclasses.replace(images, **_chosen(images, rest), **valid)
    if config.train_images:
        images = dataclasses.replace(
            images, **_chosen(images, _balanced(images, config.train_images, "--train-images"))
        )
    return images


def _chosen(images: ImageSet, chosen: Tensor, split: str = "train") -> dict[str, Tensor]:
    """The training images that ``chosen``, numbers or a mask, picks, as the fields of ``split``."""
    return {f"{split}_images": images.train_images[chosen], f"{split}_labels": images.train_labels[chosen]}


def _balanced(images: ImageSet, count: int, option: str, left: int = 0) -> Tensor:
    """The numbers of ``count`` training images, the same for each class and every call, ascending.

    Raises ``UserError`` naming ``option`` unless that leaves ``left`` images of each class.
    """
    classes = len(images.classes)
    available = (torch.bincount(images.train_labels, minlength=classes).min().item() - left) * classes
    if count % classes or count > available:
        raise UserError(f"{option} {count}: expected a multiple of {classes} (classes) up to {available}")
    order = torch.randperm(len(images.train_labels), generator=torch.Generator().manual_seed(0))
    labels = images.train_labels[order]
    return torch.cat([order[labels == c][: count // classes] for c in range(classes)]).sort().values


def _cifar(name: str, folder: Path) -> ImageSet:
    from torchvision import datasets

    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    try:
        train, test = (kind(str(folder), train=part, download=True) for part in (True, False))
    except (OSError, RuntimeError, ValueError, EOFError) as error:  # URLError is an OSError
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"cannot get {name} into {folder}: {reason}; without a network put {kind.filename} there"
        ) from None
    parts = [(torch.from_numpy(part.data), torch.tensor(part.targets)) for part in (train, test)]
    return ImageSet(tuple(train.classes), *parts[0], *parts[1])


def _digits() -> ImageSet:
    """scikit-learn's 1,797 handwritten digits of 8x8, enlarged (bilinear) to 32x32, grey as RGB."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("--data digits needs scikit-learn: pip install scikit-learn") from None
    digits = load_digits()
    small = torch.from_numpy(digits.images).float().unsqueeze(1) * (255 / 16)
    large = F.interpolate(small, size=(32, 32), mode="bilinear", align_corners=False).round().to(torch.uint8)
    images = large.permute(0, 2, 3, 1).expand(-1, -1, -1, 3).contiguous()
    labels = torch.from_numpy(digits.target).long()
    test = torch.arange(len(labels)) % TEST_EVERY == TEST_EVERY - 1
    names = tuple(map(str, digits.target_names))
    return ImageSet(names, images[~test], labels[~test], images[test], labels[test], may_flip=False)
