"""Image folders and archives, digits, CIFAR: what is read, kept and held out, what is refused and how it is said."""

import hashlib
import io
import os
import pickle
import struct
import tarfile
import zlib

import pytest
import torch
from PIL import Image
from vision_helpers import CLASSES, pack, train, write_folder, write_image

from fairseq_rskip.errors import UserError
from fairseq_rskip.vision import imagefolder
from fairseq_rskip.vision.config import Config
from fairseq_rskip.vision.data import load
from fairseq_rskip.vision.imagefolder import decode, load_image_folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "bộ ảnh")


def read(folder):
    return load_image_folder(folder, folder.parent / "cache")


def refused(folder):
    with pytest.raises(UserError) as error:
        read(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def same(a, b):
    return a["classes"] == b["classes"] and all(torch.equal(a[k], b[k]) for k in a if k != "classes")


def test_reads_pixels_and_labels_in_the_order_of_names(folder, tmp_path):
    got = read(folder)
    assert got["classes"] == tuple(sorted(CLASSES))
    assert got["train_labels"].tolist() == [c for c in range(3) for _ in range(4)]
    place = sorted(CLASSES).index("dog") * 4 + 2
    pixels = write_image(tmp_path / "again.png", seed="test12")
    assert got["test_images"][place].contiguous().numpy().tobytes() == pixels
    assert got["train_images"].shape == (12, 32, 32, 3) and got["train_images"].dtype == torch.uint8


@pytest.mark.parametrize("name", [None, ".", "deep/er/train"])
def test_archives_are_read_like_folders_and_never_unpacked(folder, tmp_path, name):
    write_image(folder / "train" / "cat" / "more" / "a.png", seed="deeper")
    packed = tmp_path / "packed"
    packed.mkdir()
    for split in ("train", "test"):
        pack(folder / split, packed / f"{split}.tar.gz", name)
    assert same(read(packed), read(folder))
    assert sorted(os.listdir(packed)) == ["test.tar.gz", "train.tar.gz"]


def test_a_class_called_train(tmp_path):
    folder = write_folder(tmp_path / "set", classes=("apple", "train"))
    packed = tmp_path / "packed"
    packed.mkdir()
    for split in ("train", "test"):
        pack(folder / split, packed / f"{split}.tgz", ".")
    assert read(packed)["classes"] == ("apple", "train")


def test_grey_images_become_rgb_links_are_followed_and_other_files_are_left_out(folder):
    write_image(folder / "train" / "cat" / "grey.JPG", seed="g", mode="L")
    (folder / "train" / "cat" / "notes.txt").write_text("not an image")
    (folder / "train" / "cat" / "._0.png").write_text("what macOS leaves")
    (folder / "train" / ".ipynb_checkpoints").mkdir()
    (folder / "train" / "dog").rename(folder / "dogs")
    (folder / "train" / "dog").symlink_to("../dogs")
    got = read(folder)
    assert len(got["train_images"]) == 13
    grey = got["train_images"][got["train_labels"] == 1][-1]
    assert torch.equal(grey[..., 0], grey[..., 2])


def test_the_second_read_comes_from_the_cache_until_something_changes(folder, monkeypatch, capsys):
    first = read(folder)
    with monkeypatch.context() as patch:
        patch.setattr(imagefolder, "decode", lambda *_: pytest.fail("decoded again"))
        assert same(read(folder), first)
    (kept,) = (folder.parent / "cache").iterdir()
    kept.write_bytes(kept.read_bytes()[:1000])
    assert same(read(folder), first) and "warning: cannot read checkpoint" in capsys.readouterr().err
    torch.save({"classes": ["cat"]}, kept)
    assert same(read(folder), first)
    assert f"warning: {kept} does not hold decoded images; reading" in capsys.readouterr().err
    write_image(folder / "train" / "cat" / "0.png", seed="other")
    assert not same(read(folder), first)


def test_a_cache_that_cannot_be_written_is_a_warning(folder, capsys):
    (folder.parent / "cache").write_text("a file where the folder should be")
    assert len(read(folder)["train_images"]) == 12
    assert "warning: the decoded images are not kept" in capsys.readouterr().err


def gone(folder):
    folder.rename(folder.parent / "elsewhere")


def without_test(folder):
    (folder / "test").rename(folder.parent / "elsewhere")


def without_images(folder):
    for image in (folder / "train").glob("*/*"):
        image.unlink()


def pipe_for_an_archive(folder):
    (folder / "test").rename(folder / "elsewhere")
    os.mkfifo(folder / "test.tar")


BAD_FOLDERS = {
    "no folder": (gone, "{} is not a folder: expected one that holds train and test"),
    "no test": (without_test, "{} holds neither a folder test nor test.tar.gz, test.tgz, test.tar"),
    "a pipe for an archive": (pipe_for_an_archive, "{}/test.tar is neither a folder nor a regular file"),
    "no images": (without_images, "{}/train: Found no valid file for the classes Vịt, cat, dog. Expected .jpg, .jpeg"),
    "an empty class": (
        lambda folder: (folder / "test" / "eel").mkdir(),
        "{}/test: Found no valid file for the classes eel. Expected .jpg",
    ),
    "a stray image": (
        lambda folder: write_image(folder / "train" / "stray.png", seed=1),
        "{}/train/stray.png is in no class folder: expected train/<class>/<image>",
    ),
    "other classes": (
        lambda folder: (folder / "test" / "dog").rename(folder / "test" / "wolf"),
        "the class folders of {0}/train and {0}/test differ (only in train: dog; only in test: wolf)",
    ),
    "another size": (
        lambda folder: write_image(folder / "test" / "cat" / "big.png", seed=1, size=(64, 48)),
        "the image {}/test/cat/big.png is 64x48: expected 32x32",
    ),
    "a pipe": (
        lambda folder: os.mkfifo(folder / "train" / "dog" / "pipe.png"),
        "{}/train/dog/pipe.png is not a regular file: expected an image",
    ),
    "a dangling link": (
        lambda folder: (folder / "train" / "dog" / "gone.png").symlink_to("nowhere"),
        "cannot read {}/train/dog/gone.png: No such file or directory",
    ),
    "a loop": (
        lambda folder: (folder / "train" / "cat" / "again").symlink_to(".."),
        "the folders {0}/train/cat/again/",
    ),
    "a folder shown twice": (
        lambda folder: (folder / "train" / "cat" / "again").symlink_to("../dog"),
        "the folders {0}/train/dog and {0}/train/cat/again are the same one: expected each only once",
    ),
    "a cut image": (
        lambda folder: os.truncate(folder / "train" / "dog" / "3.png", 200),
        "the image {}/train/dog/3.png is corrupt: ",
    ),
    "an empty image": (
        lambda folder: os.truncate(folder / "train" / "dog" / "3.png", 0),
        "the image {}/train/dog/3.png is corrupt: cannot be identified",
    ),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_what_is_wrong_with_a_folder_is_named(folder, name):
    spoil, message = BAD_FOLDERS[name]
    spoil(folder)
    assert refused(folder).startswith(message.format(folder))


def add(archive, name, content=b"", **header):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in header.items():
        setattr(member, field, value)
    archive.addfile(member, io.BytesIO(content))


def spoilt_archive(change):
    def write(folder):
        with tarfile.open(folder / "test.tar", "w") as archive:
            archive.add(folder / "test", arcname="test")
            change(archive, (folder / "test" / "cat" / "0.png").read_bytes())

    return write


def cut(keep):
    return lambda folder: (folder / "test.tar.gz").write_bytes(
        pack(folder / "test", folder.parent / "w.tgz").read_bytes()[:keep]
    )


def with_garbage(folder):
    pack(folder / "test", folder / "test.tar.gz")
    with open(folder / "test.tar.gz", "ab") as file:
        file.write(b"garbage")


def two_archives(folder):
    with tarfile.open(folder.parent / "one.tar", "w") as archive:
        archive.add(folder / "test", arcname="test")
    (folder / "test.tar").write_bytes(2 * (folder.parent / "one.tar").read_bytes())


BAD_ARCHIVES = {
    "nothing in it": (cut(0), "cannot read {}/test.tar.gz: truncated, or not a tar archive"),
    "cut in the middle": (cut(2000), "cannot read {}/test.tar.gz: truncated, or not a tar archive"),
    "garbage behind it": (with_garbage, "cannot read {}/test.tar.gz: truncated, or not a tar archive"),
    "two in one file": (two_archives, "{}/test.tar goes on after the end of its archive"),
    "an image twice": (
        spoilt_archive(lambda archive, image: add(archive, "./test/cat/0.png", image)),
        "{}/test.tar:./test/cat/0.png is in the archive twice: expected each image once",
    ),
    "a corrupt image": (
        spoilt_archive(lambda archive, _: add(archive, "test/dog/x.png", b"oh")),
        "the image {}/test.tar:test/dog/x.png is corrupt: cannot be identified",
    ),
    "a link": (
        spoilt_archive(lambda archive, _: add(archive, "test/cat/x.png", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
        "{}/test.tar:test/cat/x.png is a link: expected",
    ),
    "a device": (
        spoilt_archive(lambda archive, _: add(archive, "test/cat/x.png", type=tarfile.CHRTYPE)),
        "{}/test.tar:test/cat/x.png is not a regular file: expected",
    ),
    "a bomb": (
        spoilt_archive(lambda archive, _: add(archive, "test/cat/x.png", bytes(2**25))),
        "{}/test.tar:test/cat/x.png takes 33554432 bytes: expected a 32x32 image",
    ),
}


@pytest.mark.parametrize("name", BAD_ARCHIVES)
def test_what_is_wrong_with_an_archive_is_named(folder, name):
    spoil, message = BAD_ARCHIVES[name]
    spoil(folder)
    (folder / "test").rename(folder.parent / "elsewhere")
    assert refused(folder).startswith(message.format(folder))


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
