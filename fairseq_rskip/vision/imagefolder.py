"""Class folders of 32x32 images, or tar archives of them, decoded once and then kept in a cache.

PATH holds ``train`` and ``test``, each a folder ``train/<class>/<image>`` as torchvision's ``ImageFolder`` reads it, or
an archive ``train.tar.gz`` (``.tgz``, ``.tar``) of one.
"""

import concurrent.futures
import hashlib
import io
import os
import stat
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..console import print_line, progress
from ..errors import UserError
from ..files import write_atomically
from ..safe_load import CheckpointError, load_checkpoint

SIZE = 32
SPLITS = ("train", "test")
ARCHIVES = (".tar.gz", ".tgz", ".tar")
IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
READERS = 4  # threads
CACHE_VERSION = "3"
KEPT = ("classes", *(f"{split}_{what}" for split in SPLITS for what in ("images", "labels")))


def load_image_folder(path: Path, cache: Path) -> dict[str, Any]:
    """``classes``, and ``{train,test}_images`` uint8 ``(N, 32, 32, 3)`` and ``_labels`` int64, sorted by file name.

    Read from ``cache`` unless a name, size or modification time in ``path`` has changed since. Raises ``UserError``.
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
    print_line(f"decoding the images of {path} once; later runs read them from {kept.parent}")
    result: dict[str, Any] = {}
    for split, source in sources.items():
        names, images, labels = _decode_all(source, files[split]) if source.is_dir() else _unpack(source)
        if result.setdefault("classes", names) != names:
            differ = ", ".join(sorted(set(names) ^ set(result["classes"])))
            raise UserError(f"the class folders of {sources['train']} and {source} differ (only in one: {differ})")
        result.update({f"{split}_images": images, f"{split}_labels": labels})
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

    expected = f"expected {source.name}/<class>/<image>"
    try:
        samples = ImageFolder(source, is_valid_file=_is_image).samples
    except FileNotFoundError as error:  # torchvision names the classes without images
        raise UserError(f"{source}: {' '.join(str(error).split())} {expected}") from None
    for stray in filter(_is_image, source.glob("*")):
        raise UserError(f"{stray} is in no class folder: {expected}")
    return list(map(Path, sorted((name for name, _ in samples), key=lambda name: name.split(os.sep))))


def _is_image(file: str | Path) -> bool:
    name = os.path.basename(file)
    return name.lower().endswith(IMAGES) and not name.startswith(".")


def _fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256(CACHE_VERSION.encode())
    for file in files:
        try:
            status = file.stat()
        except OSError as error:  # a link that leads nowhere
            raise UserError(f"cannot read {file}: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{file} is not a regular file: expected an image")
        line = f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:24]


def _decode_all(source: Path, files: list[Path]) -> tuple[list[str], Tensor, Tensor]:
    """The classes, images and labels of ``files`` below ``source``."""
    names = [file.relative_to(source).parts[0] for file in files]
    classes = sorted(set(names))
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        try:
            images = list(progress(pool.map(_decode_file, files), len(files), "decoding", "image"))
        finally:
            pool.shutdown(cancel_futures=True)
    return classes, torch.stack(images), torch.tensor([classes.index(name) for name in names])


def _unpack(archive: Path) -> tuple[list[str], Tensor, Tensor]:
    """The same of an archive, which is unpacked into a temporary folder."""
    print_line(f"unpacking {archive}")
    with tempfile.TemporaryDirectory(prefix="rskip-") as folder:
        try:
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
        except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
            raise UserError(f"cannot unpack {archive}: {error}") from None
        inner = Path(folder)
        while len(entries := list(inner.iterdir())) == 1 and entries[0].is_dir():
            inner = entries[0]  # folders around the classes, such as train/
        try:
            return _decode_all(inner, _files(inner))
        except UserError as error:
            raise UserError(str(error).replace(str(inner), str(archive))) from None


def _decode_file(file: Path) -> Tensor:
    try:
        return decode(file.read_bytes(), str(file))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None


def decode(data: bytes, name: str) -> Tensor:
    """An image file's bytes as uint8 ``(32, 32, 3)``. Raises ``UserError`` with ``name`` if broken or of other size."""
    import simplejpeg
    from PIL import Image

    try:
        if simplejpeg.is_jpeg(data):
            pixels = torch.from_numpy(simplejpeg.decode_jpeg(data))  # refuses damaged ones
        else:
            with Image.open(io.BytesIO(data)) as image:
                size, values = image.size, bytearray(image.convert("RGB").tobytes())
            pixels = torch.frombuffer(values, dtype=torch.uint8).view(size[1], size[0], 3)
    except Exception as error:  # Pillow raises many kinds, SyntaxError and struct.error among them
        reason = "not an image" if "cannot identify" in str(error) else str(error)
        raise UserError(f"the image {name} cannot be decoded: {reason}") from None
    height, width, _ = pixels.shape
    if (height, width) != (SIZE, SIZE):
        raise UserError(f"the image {name} is {width}x{height}: expected {SIZE}x{SIZE}")
    return pixels
