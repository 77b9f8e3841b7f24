"""Single pictures, digits and CIFAR: what is decoded, refused and held out."""

import hashlib
import io
import pickle
import struct
import zlib

import pytest
import torch
from PIL import Image
from vision_helpers import train

from fairseq_rskip.errors import UserError
from fairseq_rskip.vision.config import Config
from fairseq_rskip.vision.data import load
from fairseq_rskip.vision.imagefolder import decode


def jpeg(mode="RGB", **options):
    """The bytes of a JPEG of noise, and where its compressed data begin."""
    file = io.BytesIO()
    noise = Image.frombytes("RGB", (32, 32), bytes(k * k % 251 for k in range(3072)))
    noise.convert(mode).save(file, "JPEG", **options)
    return file.getvalue(), file.getvalue().index(b"\xff\xda") + 20


DAMAGE = {
    "ends early": lambda data, k: data[:k] + b"\xff\xd9" + data[k + 2 :],
    "a stray restart marker": lambda data, k: data[:k] + b"\xff\xd3" + data[k + 2 :],
    "garbage": lambda data, k: data[:k] + bytes(range(200, 255)) + data[k:],
    "cut": lambda data, k: data[:k],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_that_is_damaged_in_the_middle_is_named(damage, mode):
    data, start = jpeg(mode)
    assert decode(data, "whole").shape == (32, 32, 3)
    with pytest.raises(UserError, match="^the image spoilt is corrupt: "):
        decode(DAMAGE[damage](data, start + 100), "spoilt")


def test_other_jpegs_are_read():
    for options in ({"progressive": True}, {"subsampling": 2}, {"quality": 5}, {"optimize": True}):
        with Image.open(io.BytesIO(jpeg(**options)[0])) as image:
            assert decode(jpeg(**options)[0], "whole").numpy().tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize(
    "name, mode, options, problem",
    [
        ("a.png", "RGBA", {}, "is transparent"),
        ("a.png", "LA", {}, "is transparent"),
        ("a.png", "P", {"transparency": 0}, "is transparent"),
        ("a.png", "RGB", {"transparency": (0, 0, 0)}, "is transparent"),
        ("a.png", "I;16", {}, "has 16 or more bits a channel"),
        ("a.tif", "I", {}, "has 16 or more bits a channel"),
        ("a.tif", "F", {}, "has the mode F"),
        ("a.tif", "CMYK", {}, "has the mode CMYK"),
        ("a.png", "1", {}, ""),
        ("a.png", "P", {}, ""),
    ],
    ids="rgba grey-alpha palette-alpha rgb-key 16-bit 32-bit float cmyk bilevel palette".split(),
)
def test_what_rgb_would_lose_is_refused(tmp_path, name, mode, options, problem):
    Image.new(mode, (32, 32)).save(tmp_path / name, **options)
    data = (tmp_path / name).read_bytes()
    if not problem:
        assert decode(data, name).shape == (32, 32, 3)
        return
    with pytest.raises(UserError) as error:
        decode(data, name)
    expected = "expected RGB, grey or palette, 8 bits a channel, not transparent"
    assert str(error.value) == f"the image {name} {problem}: {expected}"


def test_rgb_of_16_bits_is_refused_though_pillow_calls_it_rgb():
    """A PNG written by hand: Pillow writes none, and drops the low bytes as it reads one."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 32, 32, 16, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes(32 * 6)) * 32)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    with Image.open(io.BytesIO(png)) as image:
        assert image.mode == "RGB"
    for data in (png, b"P6 32 32 65535\n" + bytes(32 * 32 * 6)):
        with pytest.raises(UserError, match="the image deep has 16 or more bits a channel"):
            decode(data, "deep")
    for values in (b"200", b"255"):
        assert decode(b"P6 32 32 " + values + b"\n" + bytes(32 * 32 * 3), "shallow").shape == (32, 32, 3)


def test_digits_are_the_real_ones_upscaled():
    from sklearn.datasets import load_digits

    images = load(Config(data="digits"))
    assert (len(images.train_labels), len(images.test_labels), len(images.classes)) == (1438, 359, 10)
    assert not images.may_flip
    digits = load_digits()
    assert images.test_labels.tolist() == digits.target[4::5].tolist()
    block = images.test_images[7].float()[..., 0]
    # bilinear enlargement by 4: the four pixels in the middle of a cell average to nearly the cell's value
    inner = block.view(8, 4, 8, 4)[:, 1:3, :, 1:3].mean((1, 3)) * 16 / 255
    pair = torch.stack([inner.flatten(), torch.tensor(digits.images[39]).flatten().float()])
    assert torch.corrcoef(pair)[0, 1] > 0.97


def test_a_subset_has_as_many_of_each_class_and_is_always_the_same():
    images = load(Config(data="digits", train_images=200))
    assert torch.bincount(images.train_labels).tolist() == [20] * 10
    assert torch.equal(images.train_images, load(Config(data="digits", train_images=200, seeds=(7,))).train_images)
    assert len(images.test_labels) == 359
    for count in (201, 5000):
        with pytest.raises(UserError, match=rf"--train-images {count}: expected a multiple of 10 \(classes\) up to 1"):
            load(Config(data="digits", train_images=count))


def test_validation_images_are_held_out_of_the_training_images():
    everything = load(Config(data="digits"))
    held = load(Config(data="digits", valid_images=100))
    assert torch.bincount(held.valid_labels).tolist() == [10] * 10 and len(held.train_labels) == 1338
    assert torch.equal(held.test_images, everything.test_images)
    rows = [*held.train_images.flatten(1).tolist(), *held.valid_images.flatten(1).tolist()]
    assert sorted(rows) == sorted(everything.train_images.flatten(1).tolist())
    again = load(Config(data="digits", valid_images=100, train_images=50, seeds=(9,)))
    assert torch.equal(again.valid_images, held.valid_images) and len(again.train_labels) == 50
    assert len({held.digest(), everything.digest(), again.digest()}) == 3
    for count in (101, 1740):
        with pytest.raises(UserError, match=rf"--valid-images {count}: expected a multiple of 10 \(classes\) up to 1"):
            load(Config(data="digits", valid_images=count))


def test_cifar_is_read_from_torchvisions_folder(tmp_path, monkeypatch):
    """A small data set in CIFAR-10's file format, with checksums to match."""
    from torchvision import datasets

    base = tmp_path / datasets.CIFAR10.base_folder
    base.mkdir()
    rows = torch.randint(256, (3, 3072), dtype=torch.uint8).numpy()

    def write(name, value):
        data = pickle.dumps(value)
        (base / name).write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    monkeypatch.setattr(datasets.CIFAR10, "train_list", [write("data_batch_1", {"data": rows, "labels": [4, 0, 9]})])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [write("test_batch", {"data": rows[:1], "labels": [4]})])
    names = [f"class{k}" for k in range(10)]
    meta = {"filename": "batches.meta", "key": "label_names", "md5": write("batches.meta", {"label_names": names})[1]}
    monkeypatch.setattr(datasets.CIFAR10, "meta", meta)
    images = load(Config(data="cifar10", data_dir=str(tmp_path)))
    assert images.classes == tuple(names) and images.train_labels.tolist() == [4, 0, 9]
    assert torch.equal(images.train_images[1].permute(2, 0, 1).flatten(), torch.from_numpy(rows[1]))


def test_a_download_that_fails_is_one_line(tmp_path, monkeypatch, capfd):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    status, _, error = train(capfd, tmp_path / "run", "cifar10", data_dir=tmp_path / "data")
    assert status == 1
    assert error.splitlines()[-1].startswith(f"error: cannot get cifar10 into {tmp_path}/data: ")
    assert error.splitlines()[-1].endswith("put cifar-10-python.tar.gz there")
