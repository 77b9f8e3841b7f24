"""The image sets that ``--data`` names, as tensors in memory.

An image folder holds ``train`` and ``test``, each a folder ``train/<class>/<image>`` that
torchvision's ``ImageFolder`` reads, or an archive ``train.tar.gz`` (``.tgz``, ``.tar``) of one. It
is decoded once and then read from a cache.
"""

import concurrent.futures
import contextlib
import dataclasses
import gzip
import hashlib
import io
import os
import tarfile
import tempfile
import unicodedata
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

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
CACHE_VERSION = "4"  # 4: links to folders are not followed

# What an image folder may hold. The header of an image is read before its pixels: a few hundred
# bytes can claim gigabytes of them. The formats are those of ImageFolder's file names.
MAX_IMAGE_BYTES = 16 * 2**20
MAX_ARCHIVE_BYTES = 2**30  # unpacked
MAX_ARCHIVE_ENTRIES = 250_000
MAX_TIFF_TILE = 1024
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
CONTROL_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")  # of Unicode: control, surrogate, line, paragraph
Split = tuple[Sequence[str], Tensor, Tensor]  # classes, images, labels


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
        return load_image_folder(folder, Path(config.cache).expanduser())
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
    train_files = _files(train) if train.is_dir() else [train]
    test_files = _files(test) if test.is_dir() else [test]
    cached = cache / f"imagefolder-{_fingerprint(train_files + test_files)}.pt"
    if cached.is_file():
        return ImageSet(**load_checkpoint(cached))

    print_line(f"decoding the images of {path} once; later runs read them from {cached.parent}")
    classes, train_images, train_labels = _decode_split(train, train_files)
    test_classes, test_images, test_labels = _decode_split(test, test_files)
    if classes != test_classes:
        different = ", ".join(sorted(set(classes) ^ set(test_classes)))
        raise UserError(
            f"the class folders of {train} and {test} differ (only in one: {different})"
        )
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
        raise UserError(f"{path} is not a folder: expected one that holds train and test")
    if (path / split).is_dir():
        return path / split
    names = [f"{split}{suffix}" for suffix in ARCHIVES]
    for name in names:
        if (path / name).is_file():
            return path / name
    raise UserError(f"{path} holds neither a folder {split} nor {', '.join(names)}")


def _files(source: Path) -> list[Path]:
    """Return the images below ``source``, sorted by class and name.

    A link to a file is followed; one to a folder is not, because it may lead back above itself.
    Raises ``UserError``.
    """
    expected = f"expected {source.name}/<class>/<image>"
    classes = []
    for entry in sorted(source.iterdir()):
        if entry.is_dir():
            classes.append(entry)
        elif _is_image(entry):
            raise UserError(f"{entry} is in no class folder: {expected}")
    classes = _without_links(classes)
    if not classes:
        raise UserError(f"{source} has no class folder: {expected}")

    images = []
    for folder in classes:
        _check_class_name(folder)
        images_of_class = _images_below(folder)
        if not images_of_class:
            raise UserError(f"{folder} holds no image: {expected}")
        images += images_of_class
    return sorted(images, key=lambda image: image.parts)


def _images_below(folder: Path) -> list[Path]:
    """Return the images in ``folder`` and its subfolders; a line names each link to a folder."""
    images = []
    for parent, folders, names in os.walk(folder):
        _without_links([Path(parent, name) for name in folders])  # which os.walk does not follow
        images += [Path(parent, name) for name in names if _is_image(name)]
    return images


def _without_links(folders: list[Path]) -> list[Path]:
    """Return those that are no links, and print a warning for each link."""
    kept = []
    for folder in folders:
        if folder.is_symlink():
            print_line(f"warning: links to folders are not followed: {folder} is skipped", "stderr")
        else:
            kept.append(folder)
    return kept


def _check_class_name(folder: Path) -> None:
    """Raise ``UserError`` for a class name that would garble a terminal or a log."""
    for character in folder.name:
        if unicodedata.category(character) in CONTROL_CATEGORIES:
            raise UserError(
                f"the class name {folder.name!r} in {folder.parent} has a control character: "
                "rename the folder"
            )


def _is_image(file: str | Path) -> bool:
    from torchvision.datasets.folder import is_image_file

    return is_image_file(str(file)) and not os.path.basename(file).startswith(".")


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
    return _decode_all(source, files) if source.is_dir() else _unpack(source)


def _decode_all(source: Path, files: list[Path]) -> Split:
    """Return the classes, images and labels of ``files`` below ``source``."""
    names = [file.relative_to(source).parts[0] for file in files]
    classes = sorted(set(names))
    with _without_size_warnings(), concurrent.futures.ThreadPoolExecutor() as pool:
        images = list(progress(pool.map(decode, files), len(files), "decoding", "image"))
    return classes, torch.stack(images), torch.tensor([classes.index(name) for name in names])


@contextlib.contextmanager
def _without_size_warnings() -> Iterator[None]:
    """Silence Pillow's warning about large images, which :func:`decode` refuses."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


class _LimitedFile:
    """A file that refuses to be read, or moved, beyond ``limit`` bytes. Raises ``UserError``.

    It counts unpacked bytes before they are read, so that neither the files of an archive nor the
    headers between them can claim more.
    """

    def __init__(self, file: BinaryIO, limit: int, too_large: str):
        self.file = file
        self.limit = limit
        self.too_large = too_large

    def tell(self) -> int:
        return self.file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if offset > self.limit:
            raise UserError(self.too_large)
        return self.file.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        if size < 0 or self.file.tell() + size > self.limit:
            raise UserError(self.too_large)
        return self.file.read(size)


def _extract(archive: Path, folder: str) -> None:
    """Unpack ``archive``, a tar file, gzipped or not, into ``folder``.

    Raises ``UserError`` before anything is written if it unpacks to more than the limits.
    """
    with open(archive, "rb") as file:
        is_gzipped = file.read(2) == b"\x1f\x8b"
    too_large = (
        f"{archive} unpacks to more than {MAX_ARCHIVE_BYTES // 2**20:,} MiB or "
        f"{MAX_ARCHIVE_ENTRIES:,} entries: unpack it yourself and name the folder"
    )
    with gzip.open(archive) if is_gzipped else open(archive, "rb") as unpacked:
        limited: Any = _LimitedFile(unpacked, MAX_ARCHIVE_BYTES, too_large)
        with tarfile.open(fileobj=limited, mode="r:") as packed:
            for number, _ in enumerate(packed):
                if number >= MAX_ARCHIVE_ENTRIES:
                    raise UserError(too_large)
            packed.extractall(folder, filter="data")


def _unpack(archive: Path) -> Split:
    """Unpack an archive into a temporary folder and decode what it holds."""
    print_line(f"unpacking {archive}")
    with tempfile.TemporaryDirectory(prefix="rskip-") as folder:
        try:
            _extract(archive, folder)
        except TypeError:  # Python 3.10 before 3.10.12, 3.11 before 3.11.4
            raise UserError(
                f"this Python cannot unpack {archive} safely; unpack it and name the folder"
            ) from None
        except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
            raise UserError(f"cannot unpack {archive}: {error}") from None
        inner = Path(folder)
        entries = list(inner.iterdir())
        while len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink():
            inner = entries[0]  # folders around the classes, such as train/
            entries = list(inner.iterdir())
        try:
            return _decode_all(inner, _files(inner))
        except UserError as error:
            raise UserError(str(error).replace(str(inner), str(archive))) from None


def decode(file: Path) -> Tensor:
    """Return an image file as uint8 ``(32, 32, 3)``.

    The size in the header is checked before a pixel is decoded. Raises ``UserError`` if the image
    is damaged, of another size, or larger than ``MAX_IMAGE_BYTES``.
    """
    if not file.is_file():
        raise UserError(f"{file} is not a regular file: expected an image")
    if file.stat().st_size > MAX_IMAGE_BYTES:
        raise UserError(f"the image {file} has more than {MAX_IMAGE_BYTES // 2**20} MiB")
    try:
        data = file.read_bytes()
        return torch.from_numpy(_decode_bytes(data, file))
    except UserError:
        raise
    except Exception as error:  # Pillow raises many kinds, SyntaxError and struct.error among them
        raise UserError(f"the image {file} cannot be decoded: {error}") from None


def _decode_bytes(data: bytes, file: Path) -> numpy.ndarray:
    """Decode ``data``, the content of ``file``, to ``(32, 32, 3)``."""
    import simplejpeg
    from PIL import Image

    if simplejpeg.is_jpeg(data):  # it refuses damaged ones, which Pillow fills with grey
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        _check_size(width, height, file)
        return simplejpeg.decode_jpeg(data)

    if data[:4] == b"RIFF" and data[12:16] == b"VP8X":  # Pillow allocates its canvas when it opens
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
        _check_size(width, height, file)

    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        _check_size(*image.size, file)
        if image.format == "TIFF":
            _check_tiles(image)
        return numpy.array(image.convert("RGB"))


def _check_size(width: int, height: int, file: Path) -> None:
    if (width, height) != (SIZE, SIZE):
        raise UserError(f"the image {file} is {width}x{height}: expected {SIZE}x{SIZE}")


def _check_tiles(image: Any) -> None:
    """Raise ``ValueError`` for tiles of a TIFF file that are far larger than its image."""
    for number in (322, 323):  # TileWidth, TileLength
        if image.tag_v2.get(number, 0) > MAX_TIFF_TILE:
            raise ValueError(f"its tiles have more than {MAX_TIFF_TILE} pixels a side")
