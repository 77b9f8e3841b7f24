"""The image sets that ``--data`` names, as tensors in memory.

An image folder holds ``train`` and ``test``, each a folder ``train/<class>/<image>`` that
torchvision's ``ImageFolder`` reads, or an archive ``train.tar.gz`` (``.tgz``, ``.tar``) of one. It
is decoded once and then read from a cache.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..console import print_line
from ..errors import UserError
from ..files import cache_folder, make_folder, writing
from ..safe_load import CheckpointError, load_checkpoint
from .config import FOLDER, Config
from .image_files import SIZE, Split, decode_all, find_images, unpack

TEST_EVERY = 5  # every fifth digit is for testing
ARCHIVES = (".tar.gz", ".tgz", ".tar")
CACHE_VERSION = "6"  # 6: images of more than 8 bits a channel are refused, in colour, too


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """Images are uint8 ``(N, 32, 32, 3)``, labels int64 ``(N,)``.

    The validation images are those that ``--valid-images`` holds out of the training images; None
    without it.
    """

    classes: Sequence[str]
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    valid_images: Tensor | None = None
    valid_labels: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return all images and labels by the names of their fields."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> "ImageSet":
        """Return the same images and labels on ``device``."""
        moved: dict[str, Any] = {}
        for name, tensor in self.tensors().items():
            moved[name] = tensor.to(device)
        return dataclasses.replace(self, **moved)

    def digest(self) -> str:
        """SHA-256 of all images and labels."""
        digest = hashlib.sha256()
        for tensor in self.tensors().values():
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor.cpu().contiguous().numpy())
        return digest.hexdigest()

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for a run to resume with these images.

        The keys are its names in messages.
        """
        return {
            "classes": ", ".join(self.classes[:100]),
            "training images": len(self.train_labels),
            "test images": len(self.test_labels),
            "SHA-256 of images and labels": self.digest(),
        }


def load(config: Config) -> ImageSet:
    """Return the image set of ``config.data``, split and reduced as ``config`` says.

    Raises ``UserError``.
    """
    images = _load_all(config)
    if config.valid_images:
        held_out = _balanced(images, config.valid_images, "--valid-images", left=1)
        remains = torch.ones(len(images.train_labels), dtype=torch.bool)
        remains[held_out] = False
        images = dataclasses.replace(
            images,
            train_images=images.train_images[remains],
            train_labels=images.train_labels[remains],
            valid_images=images.train_images[held_out],
            valid_labels=images.train_labels[held_out],
        )
    if config.train_images:
        chosen = _balanced(images, config.train_images, "--train-images")
        images = dataclasses.replace(
            images,
            train_images=images.train_images[chosen],
            train_labels=images.train_labels[chosen],
        )
    return images


def _load_all(config: Config) -> ImageSet:
    if config.data.startswith(FOLDER):
        folder = Path(config.data.removeprefix(FOLDER)).expanduser()
        cache = Path(config.cache).expanduser() if config.cache else cache_folder()
        return load_image_folder(folder, cache)
    if config.data == "digits":
        return _digits()
    return _cifar(config.data, Path(config.data_dir).expanduser())


def _balanced(images: ImageSet, count: int, option: str, left: int = 0) -> Tensor:
    """Choose ``count`` training images, equally many of each class, always the same.

    Returns their numbers, ascending. Raises ``UserError`` naming ``option`` unless that leaves
    ``left`` images of each class.
    """
    classes = len(images.classes)
    class_sizes = torch.bincount(images.train_labels, minlength=classes)
    available = (int(class_sizes.min()) - left) * classes
    if count % classes or count > available:
        raise UserError(
            f"{option} {count}: expected a multiple of {classes} (classes) up to {available}"
        )

    order = torch.randperm(len(images.train_labels), generator=torch.Generator().manual_seed(0))
    labels = images.train_labels[order]
    per_class = count // classes
    chosen = [order[labels == number][:per_class] for number in range(classes)]
    return torch.cat(chosen).sort().values


def _cifar(name: str, folder: Path) -> ImageSet:
    from torchvision import datasets

    data_set = getattr(datasets, name.upper())
    make_folder(folder)
    try:
        train = data_set(str(folder), train=True, download=True)
        test = data_set(str(folder), train=False, download=True)
    except (OSError, RuntimeError, ValueError, EOFError) as error:  # URLError is an OSError
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"cannot get {name} into {folder}: {reason}; "
            f"without a network put {data_set.filename} there"
        ) from None
    return ImageSet(
        train.classes,
        torch.from_numpy(train.data),
        torch.tensor(train.targets),
        torch.from_numpy(test.data),
        torch.tensor(test.targets),
    )


def _digits() -> ImageSet:
    """Return scikit-learn's 1,797 handwritten digits of 8x8, enlarged to 32x32, grey as RGB."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = torch.from_numpy(digits.images).float().unsqueeze(1) * (255 / 16)
    large = F.interpolate(small, size=(SIZE, SIZE), mode="bilinear", align_corners=False)
    pixels = large.round().to(torch.uint8)
    images = pixels.permute(0, 2, 3, 1).expand(-1, -1, -1, 3).contiguous()
    labels = torch.from_numpy(digits.target).long()
    test = torch.arange(len(labels)) % TEST_EVERY == TEST_EVERY - 1
    names = list(map(str, digits.target_names))
    return ImageSet(names, images[~test], labels[~test], images[test], labels[test])


def load_image_folder(path: Path, cache: Path) -> ImageSet:
    """Return the images of ``path``, sorted by class and file name.

    They are read from ``cache`` unless a name, size or modification time in ``path`` has changed
    since. Raises ``UserError``.
    """
    train, test = _source(path, "train"), _source(path, "test")
    train_files = find_images(train) if train.is_dir() else [train]
    test_files = find_images(test) if test.is_dir() else [test]
    cached = cache / f"imagefolder-{_fingerprint(train_files + test_files)}.pt"
    if cached.is_file():
        try:
            return ImageSet(**load_checkpoint(cached))
        except CheckpointError as error:
            print_line(f"warning: {error}; the images are decoded again", "stderr")

    print_line(f"decoding the images of {path} once; later runs read them from {cached.parent}")
    classes, train_images, train_labels = _decode_split(train, train_files)
    test_classes, test_images, test_labels = _decode_split(test, test_files)
    if classes != test_classes:
        different = ", ".join(sorted(set(classes) ^ set(test_classes)))
        raise UserError(
            f"the class folders of {train} and {test} differ (only in one: {different})"
        )
    if len(classes) < 2:
        raise UserError(f"{train} has one class, {classes[0]}: expected two or more")
    images = ImageSet(classes, train_images, train_labels, test_images, test_labels)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with writing(cached) as file:
            torch.save(vars(images), file)
    except (OSError, UserError) as error:
        print_line(f"warning: the decoded images are not kept: {error}", "stderr")
    return images


def _source(path: Path, split: str) -> Path:
    """Return the folder or archive of a split. Raises ``UserError`` if there is neither."""
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}; expected a folder that holds train and test")
    if (path / split).is_dir():
        return path / split
    names = [f"{split}{suffix}" for suffix in ARCHIVES]
    for name in names:
        if (path / name).is_file():
            return path / name
    raise UserError(f"{path} holds neither a folder {split} nor {', '.join(names)}")


def _fingerprint(files: list[Path]) -> str:
    """Return a digest of the names, sizes and modification times of ``files``."""
    digest = hashlib.sha256(CACHE_VERSION.encode())
    for file in files:
        status = file.stat()
        line = f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:24]


def _decode_split(source: Path, files: list[Path]) -> Split:
    """Return the classes, images and labels of ``source``: ``files`` or an archive."""
    return decode_all(source, files) if source.is_dir() else unpack(source)
