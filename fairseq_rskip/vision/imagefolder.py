"""Class folders of 32x32 images, or tar archives of them, decoded once and then kept in a cache.

PATH holds ``train`` and ``test``, each a folder ``train/<class>/<image>`` or an archive ``train.tar.gz`` (``.tgz``,
``.tar``) of such a folder. An archive is read from beginning to end and never unpacked.
"""

import hashlib
import io
import os
import stat
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any, Dict, Iterable, Iterator, List, Tuple

import torch
from torch import Tensor

from ..errors import UserError
from ..files import write_atomically
from ..safe_load import CheckpointError, load_checkpoint
from ..tools.console import print_line

SIZE = 32
SPLITS = ("train", "test")
ARCHIVES = (".tar.gz", ".tgz", ".tar")
IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
LARGEST = 16 * 2**20  # bytes of a file that could be a 32x32 image
CACHE_VERSION = "2"  # of what is accepted, too

Parts = Tuple[str, ...]


def load_image_folder(path: Path, cache: Path) -> Dict[str, Any]:
    """``classes``, and ``{train,test}_images`` uint8 ``(N, 32, 32, 3)`` and ``_labels`` int64, sorted by file name.

    Read from ``cache`` if nothing in ``path`` has another name, size or modification time than when it was written.
    Raises ``UserError`` naming the folder or image that is missing, broken or of another size.
    """
    sources = {split: _source(path, split) for split in SPLITS}
    kept = cache / f"imagefolder-{_fingerprint(sources.values())}.pt"
    if kept.is_file():
        try:
            loaded = _checked(load_checkpoint(kept), kept)
            return {**loaded, "classes": tuple(loaded["classes"])}
        except CheckpointError as error:
            print_line(f"warning: {error}; reading {path} again", "stderr")
    print_line(f"reading {path}; the decoded images are kept in {kept.parent}")
    read = {split: _read(source, split) for split, source in sources.items()}
    train, test = (sorted({parts[0] for parts, _ in read[split]}) for split in SPLITS)
    if train != test:
        only = (("train", set(train) - set(test)), ("test", set(test) - set(train)))
        differ = "; ".join(f"only in {split}: {', '.join(sorted(names))}" for split, names in only if names)
        raise UserError(f"the class folders of {sources['train']} and {sources['test']} differ ({differ})")
    result: Dict[str, Any] = {"classes": train}
    for split in SPLITS:
        result[f"{split}_images"] = torch.stack([image for _, image in read[split]])
        result[f"{split}_labels"] = torch.tensor([train.index(parts[0]) for parts, _ in read[split]])
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, lambda file: torch.save(result, file))
    except (OSError, UserError) as error:
        print_line(f"warning: the decoded images are not kept: {error}", "stderr")
    return {**result, "classes": tuple(train)}


def _checked(loaded: Any, kept: Path) -> Dict[str, Any]:
    """``loaded``, if it is what this module keeps in its cache. Raises ``CheckpointError``."""
    keys = {"classes", *(f"{split}_{part}" for split in SPLITS for part in ("images", "labels"))}
    fits = isinstance(loaded, dict) and set(loaded) == keys and isinstance(loaded["classes"], list)
    for split in SPLITS if fits else ():
        images, labels = loaded[f"{split}_images"], loaded[f"{split}_labels"]
        fits = fits and isinstance(images, Tensor) and isinstance(labels, Tensor) and labels.dim() == 1
        fits = fits and (images.dtype, labels.dtype) == (torch.uint8, torch.int64) and len(labels) > 0
        fits = fits and tuple(images.shape) == (len(labels), SIZE, SIZE, 3)
        fits = fits and int(labels.min()) >= 0 and int(labels.max()) < len(loaded["classes"])
    if not fits:
        raise CheckpointError(f"{kept} does not hold decoded images")
    return loaded


def _source(path: Path, split: str) -> Path:
    """The folder or archive of a split."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: expected one that holds train and test")
    for candidate in [path / split, *(path / f"{split}{suffix}" for suffix in ARCHIVES)]:
        if candidate.is_dir() or candidate.is_file():
            return candidate
        if candidate.exists():
            raise UserError(f"{candidate} is neither a folder nor a regular file")
    raise UserError(f"{path} holds neither a folder {split} nor {', '.join(split + suffix for suffix in ARCHIVES)}")


def _fingerprint(sources: Iterable[Path]) -> str:
    digest = hashlib.sha256(CACHE_VERSION.encode())
    for source in sources:
        for file in sorted(_files(source)) if source.is_dir() else [source]:
            status = file.stat()
            line = f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0"
            digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:24]


def _read(source: Path, split: str) -> List[Tuple[Parts, Tensor]]:
    """Every image of a split with (class, ..., file name), sorted."""
    entries = _folder_entries(source) if source.is_dir() else _archive_entries(source)
    found = sorted(((parts, image) for parts, image in entries), key=lambda entry: entry[0])
    if not found:
        raise UserError(f"{source} holds no images ({', '.join(IMAGES)})")
    if not source.is_dir():
        found = _without_common_folder(found, split)
    for parts, _ in found:
        if len(parts) < 2:
            raise UserError(f"{source / parts[0]} is in no class folder: expected {split}/<class>/<image>")
    return found


def _without_common_folder(found: List[Tuple[Parts, Tensor]], split: str) -> List[Tuple[Parts, Tensor]]:
    """Drop the folders that an archive wraps around its class folders, such as ``train/``."""
    while all(len(parts) > 2 and parts[0] == found[0][0][0] for parts, _ in found):
        found = [(parts[1:], image) for parts, image in found]
    return found


def _files(source: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}")

    visited: Dict[Tuple[int, int], str] = {}
    for folder, _, names in os.walk(source, onerror=fail, followlinks=True):
        status = os.stat(folder)
        first = visited.setdefault((status.st_dev, status.st_ino), folder)
        if first != folder:  # a link, perhaps a loop, would count images twice
            raise UserError(f"the folders {folder} and {first} are the same one: expected each only once")
        for name in filter(_is_image, names):
            _check_regular(Path(folder) / name)
            yield Path(folder) / name


def _check_regular(file: Path) -> None:
    """Raise ``UserError`` for what a read could wait for forever, and for a link that leads nowhere."""
    try:
        regular = stat.S_ISREG(file.stat().st_mode)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    if not regular:
        raise UserError(f"{file} is not a regular file: expected an image")


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGES) and not name.startswith(".")


def _folder_entries(source: Path) -> Iterator[Tuple[Parts, Tensor]]:
    seen = set()
    for file in _files(source):
        parts = file.relative_to(source).parts
        seen.add(parts[0])
        try:
            data = file.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from None
        yield parts, decode(data, str(file))
    for folder in sorted(source.iterdir()):
        if seen and folder.is_dir() and folder.name not in seen and not folder.name.startswith("."):
            raise UserError(f"the class folder {folder} holds no images ({', '.join(IMAGES)})")


def _archive_entries(source: Path) -> Iterator[Tuple[Parts, Tensor]]:
    try:
        with tarfile.open(source, "r|*") as archive:
            for member in archive:
                parts = tuple(part for part in PurePosixPath(member.name).parts if part not in (".", "/"))
                if not parts or member.isdir() or not _is_image(parts[-1]):
                    continue
                name = f"{source}:{member.name}"
                if not member.isfile():
                    raise UserError(f"{name} is a link: expected an archive of the images themselves")
                if member.size > LARGEST:
                    raise UserError(f"{name} takes {member.size} bytes: expected a {SIZE}x{SIZE} image")
                yield parts, decode(archive.extractfile(member).read(), name)
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
    except Exception as error:  # Pillow raises many kinds, SyntaxError and struct.error among them
        reason = "cannot be identified" if "cannot identify" in str(error) else str(error)
        raise UserError(f"the image {name} is corrupt: {reason}") from None
    if (width, height) != (SIZE, SIZE):
        raise UserError(f"the image {name} is {width}x{height}: expected {SIZE}x{SIZE}")
    if lost:
        raise UserError(f"the image {name} {lost}: expected RGB, grey or palette, 8 bits a channel, not transparent")
    return torch.frombuffer(pixels, dtype=torch.uint8).view(SIZE, SIZE, 3)


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
