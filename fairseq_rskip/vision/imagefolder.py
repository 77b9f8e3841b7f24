"""Class folders of 32x32 images, or tar archives of them, decoded once and then kept in a cache.

PATH holds ``train`` and ``test``, each a folder ``train/<class>/<image>``, as of torchvision's ``ImageFolder``, or an
archive ``train.tar.gz`` (``.tgz``, ``.tar``) of such a folder. An archive is read from beginning to end and never
unpacked.
"""

import gzip
import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from ..console import print_line
from ..errors import UserError
from ..files import write_atomically
from ..safe_load import CheckpointError, load_checkpoint

SIZE = 32
SPLITS = ("train", "test")
ARCHIVES = (".tar.gz", ".tgz", ".tar")
IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
LARGEST = 16 * 2**20  # bytes of a file that could be a 32x32 image
CACHE_VERSION = "3"  # of what is accepted, too
KEPT = {"classes", *(f"{split}_{what}" for split in SPLITS for what in ("images", "labels"))}

Parts = tuple[str, ...]  # class, ..., file name


def load_image_folder(path: Path, cache: Path) -> dict[str, Any]:
    """``classes``, and ``{train,test}_images`` uint8 ``(N, 32, 32, 3)`` and ``_labels`` int64, sorted by file name.

    Read from ``cache`` if nothing in ``path`` has another name, size or modification time than when it was written.
    Raises ``UserError`` naming the folder or image that is missing, broken or of another size.
    """
    sources = {split: _source(path, split) for split in SPLITS}
    files = {split: _files(source) if source.is_dir() else [source] for split, source in sources.items()}
    kept = cache / f"imagefolder-{_fingerprint(files['train'] + files['test'])}.pt"
    if kept.is_file():
        try:
            loaded = load_checkpoint(kept)
            return {**{name: loaded[name] for name in KEPT}, "classes": tuple(loaded["classes"])}
        except (CheckpointError, KeyError, TypeError) as error:
            print_line(f"warning: {kept} does not hold decoded images: {error}; reading {path} again", "stderr")
    print_line(f"reading {path}; the decoded images are kept in {kept.parent}")
    read = {split: _read(source, files[split], split) for split, source in sources.items()}
    train, test = ({parts[0] for parts, _ in read[split]} for split in SPLITS)
    for split, only in (("train", train - test), ("test", test - train)):
        if only:
            both = f"{sources['train']} and {sources['test']}"
            raise UserError(f"the class folders of {both} differ (only in {split}: {', '.join(sorted(only))})")
    result: dict[str, Any] = {"classes": sorted(train)}
    for split in SPLITS:
        result[f"{split}_images"] = torch.stack([image for _, image in read[split]])
        result[f"{split}_labels"] = torch.tensor([result["classes"].index(parts[0]) for parts, _ in read[split]])
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, lambda file: torch.save(result, file))
    except (OSError, UserError) as error:
        print_line(f"warning: the decoded images are not kept: {error}", "stderr")
    return {**result, "classes": tuple(result["classes"])}


def _source(path: Path, split: str) -> Path:
    """The folder or archive of a split."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: expected one that holds train and test")
    archives = [path / f"{split}{suffix}" for suffix in ARCHIVES]
    found = [path / split] if (path / split).is_dir() else [archive for archive in archives if archive.is_file()]
    if not found:
        raise UserError(f"{path} holds neither a folder {split} nor {', '.join(archive.name for archive in archives)}")
    return found[0]


def _files(source: Path) -> list[Path]:
    """The images below ``source``, links followed, sorted by class and name. Raises ``UserError``."""
    from torchvision.datasets import ImageFolder

    for stray in sorted(source.iterdir()):
        if _is_image(stray.name) and not stray.is_dir():
            raise _outside_classes(stray, source.name)
    classes = sorted(entry.name for entry in source.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise UserError(f"{source} holds no images: expected {source.name}/<class>/<image>")
    numbers = {name: number for number, name in enumerate(classes)}
    try:
        samples = ImageFolder.make_dataset(str(source), numbers, is_valid_file=_is_image)
    except FileNotFoundError as error:  # a class without images; torchvision names it
        raise UserError(f"{source}: {str(error).strip()} Expected {', '.join(IMAGES)}") from None
    return sorted((Path(name) for name, _ in samples), key=lambda file: file.parts)


def _is_image(path: str) -> bool:
    name = os.path.basename(path)
    return name.lower().endswith(IMAGES) and not name.startswith(".")


def _outside_classes(image: Path, split: str) -> UserError:
    return UserError(f"{image} is in no class folder: expected {split}/<class>/<image>")


def _fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256(CACHE_VERSION.encode())
    for file in files:
        try:
            status = file.stat()
        except OSError as error:  # a link that leads nowhere
            raise UserError(f"cannot read {file}: {error.strerror}") from None
        line = f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:24]


def _read(source: Path, files: list[Path], split: str) -> list[tuple[Parts, Tensor]]:
    """Every image of a split with its place, sorted."""
    if source.is_dir():
        return [(file.relative_to(source).parts, decode(_bytes(file), str(file))) for file in files]
    found = sorted(_archive_entries(source), key=lambda entry: entry[0])
    if not found:
        raise UserError(f"{source} holds no images ({', '.join(IMAGES)})")
    while all(len(parts) > 2 and parts[0] == found[0][0][0] for parts, _ in found):
        found = [(parts[1:], image) for parts, image in found]  # folders around the class folders, such as train/
    for parts, _ in found:
        if len(parts) < 2:
            raise _outside_classes(source / parts[0], split)
    return found


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


def _archive_entries(source: Path) -> Iterator[tuple[Parts, Tensor]]:
    """The images of an archive. Raises ``UserError`` for one that is damaged, or holds anything twice."""
    seen = set()
    try:
        with open(source, "rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            with tarfile.open(fileobj=gzip.GzipFile(fileobj=raw) if packed else raw, mode="r|") as archive:
                for member in archive:
                    parts = tuple(part for part in PurePosixPath(member.name).parts if part not in (".", "/"))
                    if not parts or member.isdir() or not _is_image(parts[-1]):
                        continue
                    name = f"{source}:{member.name}"
                    if ".." in parts:
                        raise UserError(f"{name} leads out of its folder: expected split/class/image")
                    if not member.isfile():
                        raise UserError(f"{name} is not a regular file: expected an archive of the images themselves")
                    if member.size > LARGEST:
                        raise UserError(f"{name} takes {member.size} bytes: expected a {SIZE}x{SIZE} image")
                    if parts in seen:
                        raise UserError(f"{name} is in the archive twice: expected each image once")
                    seen.add(parts)
                    yield parts, decode(archive.extractfile(member).read(), name)
                if any(block.strip(b"\0") for block in iter(lambda: archive.fileobj.read(2**20), b"")):
                    raise UserError(f"{source} goes on after the end of its archive: damaged, or two in one file")
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise UserError(f"cannot read {source}: truncated, or not a tar archive ({error})") from None


def decode(data: bytes, name: str) -> Tensor:
    """An image file's bytes as uint8 ``(32, 32, 3)``. Raises ``UserError`` with ``name`` if broken or of other size."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            lost = _what_rgb_loses(image)
            if (width, height) == (SIZE, SIZE) and not lost:
                pixels = bytearray(image.convert("RGB").tobytes())
                if image.format == "JPEG":
                    _check_jpeg(data)
    except ImportError:
        raise
    except Exception as error:  # Pillow raises many kinds, SyntaxError and struct.error among them
        reason = "cannot be identified" if "cannot identify" in str(error) else str(error)
        raise UserError(f"the image {name} is corrupt: {reason}") from None
    if (width, height) != (SIZE, SIZE):
        raise UserError(f"the image {name} is {width}x{height}: expected {SIZE}x{SIZE}")
    if lost:
        raise UserError(f"the image {name} {lost}: expected RGB, grey or palette, 8 bits a channel, not transparent")
    return torch.frombuffer(pixels, dtype=torch.uint8).view(SIZE, SIZE, 3)


_JPEG_COLOURS = {"Gray": "GRAY", "CMYK": "CMYK", "YCCK": "CMYK"}


def _check_jpeg(data: bytes) -> None:
    """Raise ``ValueError`` where the decoder had to make pixels up, of which Pillow says nothing: data that ends early,
    a marker or garbage within."""
    import simplejpeg

    try:
        colours = simplejpeg.decode_jpeg_header(data)[2]
    except ValueError:
        return  # a subsampling that TurboJPEG has no name for; Pillow has read it
    simplejpeg.decode_jpeg(data, colorspace=_JPEG_COLOURS.get(colours, "RGB"), strict=True)


def _what_rgb_loses(image: Any) -> str:
    """What 8-bit RGB could not hold of a Pillow image, as a part of a sentence, or ""."""
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        return "is transparent"
    # Pillow's word for how a file holds its pixels: RGB;16B, or a PPM's largest value
    deep = any(";16" in str(part) or (part[0] == "ppm" and part[3][1] > 255) for part in image.tile)
    if deep or image.mode.startswith("I"):
        return "has 16 or more bits a channel"
    jpeg = ("CMYK", "YCbCr") if image.format == "JPEG" else ()
    return "" if image.mode in ("1", "L", "P", "RGB", *jpeg) else f"has the mode {image.mode}"
