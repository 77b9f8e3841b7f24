"""scripts/cifar_images.py: images of the npm package become class folders, pixel for pixel."""

import importlib.util
import io
import json
import tarfile
from pathlib import Path

import numpy
import pytest
from PIL import Image

from fairseq_rskip.errors import UserError

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "cifar_images.py"


@pytest.fixture(scope="module")
def cifar_images():
    spec = importlib.util.spec_from_file_location("cifar_images", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def png_of(images):
    """One row an image, as the package has them."""
    file = io.BytesIO()
    Image.fromarray(images.reshape(len(images), -1, 3)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def package(cifar_images):
    """An archive of three images a batch, and the pixels and labels of each split."""
    random = numpy.random.default_rng(1)
    file = io.BytesIO()
    content = {}
    with tarfile.open(fileobj=file, mode="w:gz") as archive:

        def add(name, data):
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))

        for split, (names, labels) in cifar_images.MEMBERS.items():
            shape = (len(names), 3, 32, 32, 3)
            batches = random.integers(0, 256, size=shape, dtype=numpy.uint8)
            classes = random.integers(0, 10, size=3 * len(names)).tolist()
            for name, batch in zip(names, batches):
                add(name, png_of(batch))
            add(labels, json.dumps(classes).encode())
            content[split] = (batches.reshape(-1, 32, 32, 3), classes)
    return file.getvalue(), content


def test_every_pixel_and_label_is_kept(cifar_images, package, tmp_path):
    archive, content = package
    assert cifar_images.unpack(archive, tmp_path, "png") == {"train": 15, "test": 3}
    for split, (images, classes) in content.items():
        for number, (image, label) in enumerate(zip(images, classes)):
            path = tmp_path / split / cifar_images.CLASSES[label] / f"{number:05d}.png"
            assert (numpy.asarray(Image.open(path)) == image).all()


def test_jpeg_files_have_half_the_colours(cifar_images, package, tmp_path):
    cifar_images.unpack(package[0], tmp_path, "jpg")
    path = next((tmp_path / "test").glob("*/*.jpg"))
    with Image.open(path) as image:
        assert image.format == "JPEG"
        assert image.layer[0][1:3] == (2, 2)  # brightness twice as fine as the colours'
        assert image.quantization[0][0] == 8  # 16 in the standard's table for quality 50


def test_another_file_and_a_present_folder_are_refused(cifar_images, package, tmp_path):
    archive = tmp_path / "a.tgz"
    archive.write_bytes(package[0])
    with pytest.raises(UserError, match="its SHA-256 is another"):
        cifar_images.main([str(archive), str(tmp_path / "out")])
    with pytest.raises(UserError, match="cannot read .*: No such file"):
        cifar_images.main([str(tmp_path / "none.tgz"), str(tmp_path / "out")])
    with pytest.raises(UserError, match="is already there"):
        cifar_images.main([str(archive), str(tmp_path)])
    assert not (tmp_path / "out").exists()
