"""Digits and CIFAR: what is read, refused and held out."""

import hashlib
import pickle

import numpy
import pytest
import torch
from PIL import Image
from vision_helpers import train

from fairseq_rskip.errors import UserError
from fairseq_rskip.vision.config import Config
from fairseq_rskip.vision.data import load


def test_digits_are_the_real_ones_upscaled():
    from sklearn.datasets import load_digits

    images = load(Config(data="digits"))
    assert (len(images.train_labels), len(images.test_labels), len(images.classes)) == (
        1438,
        359,
        10,
    )
    digits = load_digits()
    assert images.test_labels.tolist() == digits.target[4::5].tolist()
    for small, large in zip(digits.images[4::5], images.test_images):
        brightness = Image.fromarray((small * 255 / 16).astype("float32"))  # of 16 levels
        pixels = numpy.asarray(brightness.resize((32, 32), Image.Resampling.BILINEAR)).round()
        assert (large.numpy() == pixels[..., None]).all()


def test_validation_images_are_held_out_and_subsets_are_balanced():
    everything = load(Config(data="digits"))
    held = load(Config(data="digits", valid_images=100))
    assert (
        torch.bincount(held.valid_labels).tolist() == [10] * 10 and len(held.train_labels) == 1338
    )
    assert torch.equal(held.test_images, everything.test_images)
    rows = [*held.train_images.flatten(1).tolist(), *held.valid_images.flatten(1).tolist()]
    all_rows = everything.train_images.flatten(1).tolist()
    assert sorted(rows) == sorted(all_rows)
    again = load(Config(data="digits", valid_images=100, train_images=50, seeds=(9,)))
    assert (
        torch.equal(again.valid_images, held.valid_images)
        and torch.bincount(again.train_labels).tolist() == [5] * 10
    )
    assert len({held.digest(), everything.digest(), again.digest()}) == 3
    for images in (held.valid_images, again.train_images):
        chosen = images.flatten(1).tolist()
        assert chosen == [row for row in all_rows if row in chosen]  # not class by class
    least = min(everything.train_labels.tolist().count(digit) for digit in range(10))
    for option, most in (("valid_images", 10 * (least - 1)), ("train_images", 10 * least)):
        for count in (101, most + 10):
            with pytest.raises(
                UserError, match=rf"{count}: expected a multiple of 10 \(classes\) up to {most}$"
            ):
                load(Config(data="digits", **{option: count}))


def test_cifar_is_read_from_torchvisions_folder(tmp_path, monkeypatch):
    """A small data set in CIFAR-10's file format, with checksums to match."""
    from torchvision import datasets

    base = tmp_path / datasets.CIFAR10.base_folder
    base.mkdir()
    rows = torch.randint(256, (4, 3072), dtype=torch.uint8).numpy()

    def write(name, value):
        data = pickle.dumps(value)
        (base / name).write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    monkeypatch.setattr(
        datasets.CIFAR10,
        "train_list",
        [write("data_batch_1", {"data": rows[:3], "labels": [4, 0, 9]})],
    )
    monkeypatch.setattr(
        datasets.CIFAR10, "test_list", [write("test_batch", {"data": rows[3:], "labels": [7]})]
    )
    names = [f"class{k}" for k in range(10)]
    meta = {
        "filename": "batches.meta",
        "key": "label_names",
        "md5": write("batches.meta", {"label_names": names})[1],
    }
    monkeypatch.setattr(datasets.CIFAR10, "meta", meta)
    images = load(Config(data="cifar10", data_dir=str(tmp_path)))
    assert images.classes == names
    assert images.train_labels.tolist() == [4, 0, 9] and images.test_labels.tolist() == [7]
    read = torch.cat([images.train_images, images.test_images])
    assert torch.equal(read.permute(0, 3, 1, 2).flatten(1), torch.from_numpy(rows))


def test_a_download_that_fails_is_one_line(tmp_path, monkeypatch, capfd):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    status, _, error = train(capfd, tmp_path / "run", "cifar10", data_dir=tmp_path / "data")
    assert status == 1
    assert error.splitlines()[-1].startswith(f"error: cannot get cifar10 into {tmp_path}/data: ")
    assert error.splitlines()[-1].endswith("put cifar-10-python.tar.gz there")
    (tmp_path / "file").touch()
    status, _, error = train(capfd, tmp_path / "run", "cifar10", data_dir=tmp_path / "file" / "x")
    assert status == 1
    assert error.splitlines()[-1].startswith(f"error: cannot write into {tmp_path}/file/x: ")
