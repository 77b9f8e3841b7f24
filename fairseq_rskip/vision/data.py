"""The image sets that ``--data`` names, as tensors in memory.

An image folder holds ``train`` and ``test``, each a folder ``train/<class>/<image>`` that torchvision's ``ImageFolder``
reads, or an archive ``train.tar.gz`` (``.tgz``, ``.tar``) of one. It is decoded once and then kept in a cache.
"""

import concurrent.futures
import dataclasses
import hashlib
import os
import tarfile
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from ..console import print_line, progress
from ..errors import UserError
from ..files import writing
from ..safe_load import load_checkpoint
from .config import FOLDER, Config

TEST_EVERY = 5  # every fifth digit is for testing
SIZE = 32
ARCHIVES = (".tar.gz", ".tgz", ".tar")
CACHE_VERSION = "3"
Split = tuple[Sequence[str], Tensor, Tensor]  # classes, images, labels


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """Images are uint8 ``(N, 32, 32, 3)``, labels int64 ``(N,)``.

    The validation images are those that ``--valid-images`` holds out of the training images; None without it.
    """

    classes: Sequence[str]
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    valid_images: Tensor | None = None
    valid_labels: Tensor | None = None

    def to(self, device: torch.device) -> "ImageSet":
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **moved)

    def digest(self) -> str:
        """SHA-256 of all images and labels."""
        digest = hashlib.sha256()
        for part in filter(torch.is_tensor, vars(self).values()):
            digest.update(str(tuple(part.shape)).encode())
            digest.update(part.cpu().contiguous().numpy())
        return digest.hexdigest()

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for a run to resume with these images, by its name in a message."""
        counts = {"training images": len(self.train_labels), "test images": len(self.test_labels)}
        return {"classes": ", ".join(self.classes[:100]), **counts, "SHA-256 of images and labels": self.digest()}


def load(config: Config) -> ImageSet:
    """The image set of ``config.data``, split and reduced as ``config`` says. Raises ``UserError``."""
    if config.data.startswith(FOLDER):
        images = load_image_folder(Path(config.data[len(FOLDER) :]).expanduser(), Path(config.cache).expanduser())
    elif config.data == "digits":
        images = _digits()
    else:
        images = _cifar(config.data, Path(config.data_dir).expanduser())
    if config.valid_images:
        held = _balanced(images, config.valid_images, "--valid-images", left=1)
        rest = torch.ones(len(images.train_labels), dtype=torch.bool).index_fill(0, held, False)
        images = dataclasses.replace(images, **_chosen(images, rest), **_chosen(images, held, "valid"))
    if config.train_images:
        some = _balanced(images, config.train_images, "--train-images")
        images = dataclasses.replace(images, **_chosen(images, some))
    return images


def _chosen(images: ImageSet, chosen: Tensor, split: str = "train") -> dict[str, Tensor]:
    """The training images that ``chosen``, numbers or a mask, picks, as the fields of ``split``."""
    return {f"{split}_images": images.train_images[chosen], f"{split}_labels": images.train_labels[chosen]}


def _balanced(images: ImageSet, count: int, option: str, left: int = 0) -> Tensor:
    """Choose ``count`` training images, as many of each class, always the same; returns their numbers, ascending.

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

    kind = getattr(datasets, name.upper())
    try:
        train, test = (kind(str(folder), train=part, download=True) for part in (True, False))
    except (OSError, RuntimeError, ValueError, EOFError) as error:  # URLError is an OSError
        reason = f"{' '.join(str(error).split())[:200]}; without a network put {kind.filename} there"
        raise UserError(f"cannot get {name} into {folder}: {reason}") from None
    parts = [(torch.from_numpy(part.data), torch.tensor(part.targets)) for part in (train, test)]
    return ImageSet(train.classes, *parts[0], *parts[1])


def _digits() -> ImageSet:
    """scikit-learn's 1,797 handwritten digits of 8x8, enlarged (bilinear) to 32x32, grey as RGB."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = torch.from_numpy(digits.images).float().unsqueeze(1) * (255 / 16)
    large = F.interpolate(small, size=(SIZE, SIZE), mode="bilinear", align_corners=False).round().to(torch.uint8)
    images = large.permute(0, 2, 3, 1).expand(-1, -1, -1, 3).contiguous()
    labels = torch.from_numpy(digits.target).long()
    test = torch.arange(len(labels)) % TEST_EVERY == TEST_EVERY - 1
    names = list(map(str, digits.target_names))
    return ImageSet(names, images[~test], labels[~test], images[test], labels[test])


def load_image_folder(path: Path, cache: Path) -> ImageSet:
    """The images of ``path``, sorted by class and file name.

    Read from ``cache`` unless a name, size or modification time in ``path`` has changed since. Raises ``UserError``.
    """
    sources = [_source(path, split) for split in ("train", "test")]
    files = [_files(source) if source.is_dir() else [source] for source in sources]
    kept = cache / f"imagefolder-{_fingerprint(files[0] + files[1])}.pt"
    if kept.is_file():
        return ImageSet(**load_checkpoint(kept))
    print_line(f"decoding the images of {path} once; later runs read them from {kept.parent}")
    (classes, *train), (others, *test) = (
        _decode_all(source, found) if source.is_dir() else _unpack(source) for source, found in zip(sources, files)
    )
    if classes != others:
        differ = ", ".join(sorted(set(classes) ^ set(others)))
        raise UserError(f"the class folders of {sources[0]} and {sources[1]} differ (only in one: {differ})")
    images = ImageSet(classes, *train, *test)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with writing(kept) as file:
            torch.save(vars(images), file)
    except (OSError, UserError) as error:
        print_line(f"warning: the decoded images are not kept: {error}", "stderr")
    return images


def _source(path: Path, split: str) -> Path:
    """The folder or archive of a split."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: expected one that holds train and test")
    names = [f"{split}{suffix}" for suffix in ARCHIVES]
    sources = [path / split] if (path / split).is_dir() else [path / name for name in names if (path / name).is_file()]
    if not sources:
        raise UserError(f"{path} holds neither a folder {split} nor {', '.join(names)}")
    return sources[0]


def _files(source: Path) -> list[Path]:
    """The images below ``source``, links followed, sorted by class and name. Raises ``UserError``."""
    from torchvision.datasets import ImageFolder

    expected = f"expected {source.name}/<class>/<image>"
    try:
        samples = ImageFolder(source, is_valid_file=_is_image).samples
    except FileNotFoundError as error:  # torchvision names the classes without images
        raise UserError(f"{source}: {' '.join(str(error).split())} {expected}") from None
    for stray in filter(_is_image, source.glob("*")):
        raise UserError(f"{stray} is in no class folder: {expected}")
    return list(map(Path, sorted((name for name, _ in samples), key=lambda name: name.split(os.sep))))


def _is_image(file: str | Path) -> bool:
    from torchvision.datasets.folder import is_image_file

    return is_image_file(str(file)) and not os.path.basename(file).startswith(".")


def _fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256(CACHE_VERSION.encode())
    for file in files:
        status = file.stat()
        line = f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:24]


def _decode_all(source: Path, files: list[Path]) -> Split:
    """The classes, images and labels of ``files`` below ``source``."""
    names = [file.relative_to(source).parts[0] for file in files]
    classes = sorted(set(names))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        images = list(progress(pool.map(decode, files), len(files), "decoding", "image"))
    return classes, torch.stack(images), torch.tensor([classes.index(name) for name in names])


def _unpack(archive: Path) -> Split:
    """Unpack an archive into a temporary folder and decode what it holds."""
    print_line(f"unpacking {archive}")
    with tempfile.TemporaryDirectory(prefix="rskip-") as folder:
        try:
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
        except TypeError:  # Python 3.10 before 3.10.12, 3.11 before 3.11.4
            raise UserError(f"this Python cannot unpack {archive} safely; unpack it and name the folder") from None
        except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
            raise UserError(f"cannot unpack {archive}: {error}") from None
        inner = Path(folder)
        while len(entries := list(inner.iterdir())) == 1 and entries[0].is_dir():
            inner = entries[0]  # folders around the classes, such as train/
        try:
            return _decode_all(inner, _files(inner))
        except UserError as error:
            raise UserError(str(error).replace(str(inner), str(archive))) from None


def decode(file: Path) -> Tensor:
    """An image file as uint8 ``(32, 32, 3)``. Raises ``UserError`` if it is damaged or of another size."""
    import simplejpeg
    from PIL import Image

    if not file.is_file():
        raise UserError(f"{file} is not a regular file: expected an image")
    try:
        data = file.read_bytes()
        if simplejpeg.is_jpeg(data):  # it refuses damaged ones, which Pillow fills with grey
            pixels = torch.from_numpy(simplejpeg.decode_jpeg(data))
        else:
            with Image.open(file) as image:
                pixels = torch.from_numpy(numpy.array(image.convert("RGB")))
    except Exception as error:  # Pillow raises many kinds, SyntaxError and struct.error among them
        raise UserError(f"the image {file} cannot be decoded: {error}") from None
    if pixels.shape[:2] != (SIZE, SIZE):
        raise UserError(f"the image {file} is {pixels.size(1)}x{pixels.size(0)}: expected {SIZE}x{SIZE}")
    return pixels
