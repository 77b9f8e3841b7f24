"""The files of an image folder: which they are, how they are decoded, and archives of them.

The header of an image is read before its pixels: a few hundred bytes can claim gigabytes of them.
"""

import concurrent.futures
import contextlib
import gzip
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
from torch import Tensor

from ..console import print_line, progress
from ..errors import UserError

SIZE = 32
MAX_IMAGE_BYTES = 16 * 2**20
MAX_ARCHIVE_BYTES = 2**30  # unpacked
MAX_ARCHIVE_ENTRIES = 250_000
MAX_TIFF_TILE = 1024
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # those of ImageFolder's file names
CONTROL_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")  # of Unicode: control, surrogate, line, paragraph
Split = tuple[Sequence[str], Tensor, Tensor]  # classes, images, labels


def find_images(source: Path) -> list[Path]:
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


def decode_all(source: Path, files: list[Path]) -> Split:
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


def decode(file: Path) -> Tensor:
    """Return an image file as uint8 ``(32, 32, 3)``.

    The size in the header is checked before a pixel is decoded. Raises ``UserError`` if the image
    is damaged, of another size, or larger than ``MAX_IMAGE_BYTES``.
    """
    from PIL import UnidentifiedImageError

    if not file.is_file():
        raise UserError(f"{file} is not a regular file: expected an image")
    if file.stat().st_size == 0:
        raise UserError(f"the image {file} is empty: expected an image")
    if file.stat().st_size > MAX_IMAGE_BYTES:
        raise UserError(f"the image {file} has more than {MAX_IMAGE_BYTES // 2**20} MiB")
    try:
        data = file.read_bytes()
        return torch.from_numpy(_decode_bytes(data, file))
    except UserError:
        raise
    except UnidentifiedImageError:  # whose text is about the bytes in memory
        raise UserError(
            f"the image {file} cannot be decoded: Pillow knows no such format"
        ) from None
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
        bits = _bits_per_channel(image, data)
        if bits > 8:  # Pillow would clip them, or drop those that do not fit
            raise UserError(f"the image {file} has {bits} bits a channel: expected 8")
        return numpy.array(image.convert("RGB"))


def _check_size(width: int, height: int, file: Path) -> None:
    if (width, height) != (SIZE, SIZE):
        raise UserError(f"the image {file} is {width}x{height}: expected {SIZE}x{SIZE}")


def _bits_per_channel(image: Any, data: bytes) -> int:
    """The bits of a channel in the file, which may be more than Pillow's modes can hold."""
    if image.format == "PNG":
        return data[24]  # of the header chunk, which is always the first
    if image.format == "TIFF":
        return max(image.tag_v2.get(258, (1,)))  # BitsPerSample
    if image.format == "PPM" and image.mode == "RGB":
        mode_and_largest = image.tile[0].args  # the mode alone where the largest value is 255
        return 8 if isinstance(mode_and_largest, str) else mode_and_largest[1].bit_length()
    if image.mode.startswith("I;16"):
        return 16
    return 32 if image.mode in ("I", "F") else 8


def _check_tiles(image: Any) -> None:
    """Raise ``ValueError`` for tiles of a TIFF file that are far larger than its image."""
    for number in (322, 323):  # TileWidth, TileLength
        if image.tag_v2.get(number, 0) > MAX_TIFF_TILE:
            raise ValueError(f"its tiles have more than {MAX_TIFF_TILE} pixels a side")


def unpack(archive: Path) -> Split:
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
            return decode_all(inner, find_images(inner))
        except UserError as error:
            raise UserError(str(error).replace(str(inner), str(archive))) from None


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
