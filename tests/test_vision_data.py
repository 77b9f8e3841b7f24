"""Image folders and archives, digits, CIFAR: what is read, what is cached, what is refused and how it is said."""

import io
import os
import pickle
import tarfile

import pytest
import torch
from vision_helpers import CLASSES, pack, train, write_folder, write_image

from fairseq_rskip.errors import UserError
from fairseq_rskip.vision import imagefolder
from fairseq_rskip.vision.config import Config
from fairseq_rskip.vision.data import load
from fairseq_rskip.vision.imagefolder import load_image_folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "bộ ảnh")


def read(folder, tmp_path):
    return load_image_folder(folder, tmp_path / "cache")


def refused(folder, tmp_path):
    with pytest.raises(UserError) as error:
        read(folder, tmp_path)
    assert "\n" not in str(error.value)
    return str(error.value)


def same(a, b):
    return a["classes"] == b["classes"] and all(torch.equal(a[k], b[k]) for k in a if k != "classes")


def test_reads_pixels_and_labels_in_the_order_of_names(folder, tmp_path):
    got = read(folder, tmp_path)
    assert got["classes"] == tuple(sorted(CLASSES))
    assert got["train_labels"].tolist() == [c for c in range(3) for _ in range(4)]
    place = sorted(CLASSES).index("dog") * 4 + 2
    pixels = write_image(tmp_path / "again.png", seed="test12")
    assert got["test_images"][place].contiguous().numpy().tobytes() == pixels
    assert got["train_images"].shape == (12, 32, 32, 3) and got["train_images"].dtype == torch.uint8


@pytest.mark.parametrize("name", [None, ".", "deep/er/train"])
def test_archives_are_read_like_folders_and_never_unpacked(folder, tmp_path, name):
    packed = tmp_path / "packed"
    packed.mkdir()
    for split in ("train", "test"):
        pack(folder / split, packed / f"{split}.tar.gz", name)
    assert same(read(packed, tmp_path), read(folder, tmp_path))
    assert sorted(os.listdir(packed)) == ["test.tar.gz", "train.tar.gz"]


def test_a_class_called_train(tmp_path):
    folder = write_folder(tmp_path / "set", classes=("apple", "train"))
    packed = tmp_path / "packed"
    packed.mkdir()
    for split in ("train", "test"):
        pack(folder / split, packed / f"{split}.tgz", ".")
    assert read(packed, tmp_path)["classes"] == ("apple", "train")


def test_grey_and_palette_images_become_rgb_and_other_files_are_left_out(folder, tmp_path):
    write_image(folder / "train" / "cat" / "grey.JPG", seed="g", mode="L")
    (folder / "train" / "cat" / "notes.txt").write_text("not an image")
    (folder / "train" / "cat" / "._0.png").write_text("what macOS leaves")
    got = read(folder, tmp_path)
    assert len(got["train_images"]) == 13
    grey = got["train_images"][got["train_labels"] == 1][-1]
    assert torch.equal(grey[..., 0], grey[..., 2])


def test_the_second_read_comes_from_the_cache_until_something_changes(folder, tmp_path, monkeypatch):
    first = read(folder, tmp_path)
    decode = imagefolder.decode
    monkeypatch.setattr(imagefolder, "decode", lambda *_: pytest.fail("decoded again"))
    assert same(read(folder, tmp_path), first)
    monkeypatch.setattr(imagefolder, "decode", decode)
    write_image(folder / "train" / "cat" / "0.png", seed="other")
    assert not same(read(folder, tmp_path), first)


def test_a_broken_cache_is_made_anew(folder, tmp_path, capsys):
    first = read(folder, tmp_path)
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(kept.read_bytes()[:1000])
    assert same(read(folder, tmp_path), first)
    assert "warning: cannot read checkpoint" in capsys.readouterr().err
    assert same(load_image_folder(folder, tmp_path / "cache"), first)


def test_a_cache_that_cannot_be_written_is_a_warning(folder, tmp_path, capsys):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert len(read(folder, tmp_path)["train_images"]) == 12
    assert "warning: the decoded images are not kept" in capsys.readouterr().err


def test_no_such_folder(tmp_path):
    assert (
        refused(tmp_path / "none", tmp_path)
        == f"{tmp_path}/none is not a folder: expected one that holds train and test"
    )


def test_a_missing_split(tmp_path):
    write_folder(tmp_path / "set", splits=("train",))
    message = f"{tmp_path}/set holds neither a folder test nor test.tar.gz, test.tgz, test.tar"
    assert refused(tmp_path / "set", tmp_path) == message


def test_no_images(tmp_path):
    for split in ("train", "test"):
        (tmp_path / "set" / split / "cat").mkdir(parents=True)
    assert refused(tmp_path / "set", tmp_path).startswith(f"{tmp_path}/set/train holds no images (.jpg")


def test_an_empty_class_folder(folder, tmp_path):
    (folder / "test" / "eel").mkdir()
    assert refused(folder, tmp_path).startswith(f"the class folder {folder}/test/eel holds no images")


def test_a_corrupt_image_is_named(folder, tmp_path):
    image = folder / "train" / "dog" / "3.png"
    image.write_bytes(image.read_bytes()[:200])
    assert refused(folder, tmp_path).startswith(f"the image {image} is corrupt: ")
    image.write_bytes(b"nothing of the kind")
    assert refused(folder, tmp_path) == f"the image {image} is corrupt: cannot be identified"
    image.write_bytes(b"")
    assert refused(folder, tmp_path) == f"the image {image} is corrupt: cannot be identified"


def test_a_corrupt_image_in_an_archive_is_named(folder, tmp_path):
    (folder / "test" / "dog" / "1.png").write_bytes(b"oh")
    pack(folder / "test", tmp_path / "test.tar.gz")
    pack(folder / "train", tmp_path / "train.tar.gz")
    assert (
        refused(tmp_path, tmp_path)
        == f"the image {tmp_path}/test.tar.gz:test/dog/1.png is corrupt: cannot be identified"
    )


def test_an_image_of_another_size_is_named(folder, tmp_path):
    write_image(folder / "test" / "cat" / "big.png", seed=1, size=(64, 48))
    assert refused(folder, tmp_path) == f"the image {folder}/test/cat/big.png is 64x48: expected 32x32"


def test_an_image_outside_the_class_folders_is_named(folder, tmp_path):
    write_image(folder / "train" / "stray.png", seed=1)
    message = f"{folder}/train/stray.png is in no class folder: expected train/<class>/<image>"
    assert refused(folder, tmp_path) == message


def test_class_folders_that_differ(folder, tmp_path):
    (folder / "test" / "dog").rename(folder / "test" / "wolf")
    message = f"the class folders of {folder}/train and {folder}/test differ (only in train: dog; only in test: wolf)"
    assert refused(folder, tmp_path) == message


@pytest.mark.parametrize("keep", [0, 100, 2000])
def test_a_truncated_archive_is_named(folder, tmp_path, keep):
    pack(folder / "test", tmp_path / "test.tar.gz")
    whole = pack(folder / "train", tmp_path / "train.tar.gz").read_bytes()
    (tmp_path / "train.tar.gz").write_bytes(whole[:keep])
    assert refused(tmp_path, tmp_path).startswith(
        f"cannot read {tmp_path}/train.tar.gz: truncated, or not a tar archive"
    )


def test_a_link_in_an_archive_is_refused(folder, tmp_path):
    pack(folder / "train", tmp_path / "train.tar.gz")
    with tarfile.open(tmp_path / "test.tar", "w") as tar:
        link = tarfile.TarInfo("test/cat/0.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert "test/cat/0.png is a link: expected" in refused(tmp_path, tmp_path)


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
    assert (
        torch.corrcoef(torch.stack([inner.flatten(), torch.tensor(digits.images[39]).flatten().float()]))[0, 1] > 0.97
    )


def test_a_subset_has_as_many_of_each_class_and_is_always_the_same():
    images = load(Config(data="digits", train_images=200))
    assert torch.bincount(images.train_labels).tolist() == [20] * 10
    assert torch.equal(images.train_images, load(Config(data="digits", train_images=200, seeds=(7,))).train_images)
    assert len(images.test_labels) == 359
    for count in (201, 5000):
        with pytest.raises(UserError, match=rf"--train-images {count}: expected a multiple of 10 \(classes\) up to 1"):
            load(Config(data="digits", train_images=count))


def test_cifar_is_read_from_torchvisions_folder(tmp_path, monkeypatch):
    """A small data set in CIFAR-10's file format, with checksums to match."""
    import hashlib

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


def test_a_bomb_in_an_archive_is_refused_before_it_is_read(folder, tmp_path):
    pack(folder / "train", tmp_path / "train.tar.gz")
    with tarfile.open(tmp_path / "test.tar.gz", "w:gz") as tar:
        bomb = tarfile.TarInfo("test/cat/0.png")
        bomb.size = 2**25
        tar.addfile(bomb, io.BytesIO(bytes(2**25)))
    assert "takes 33554432 bytes: expected a 32x32 image" in refused(tmp_path, tmp_path)
