"""Image folders and archives: what is read and kept, what is refused and how it is said."""

import os
import tarfile

import pytest
import torch
from PIL import Image
from vision_helpers import CLASSES, pack, write_folder, write_image

from fairseq_rskip.errors import UserError
from fairseq_rskip.vision import data
from fairseq_rskip.vision.data import decode, load_image_folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "bộ ảnh")


def read(folder):
    return vars(load_image_folder(folder, folder.parent / "cache"))


def same(a, b):
    return a["classes"] == b["classes"] and all(torch.equal(a[k], b[k]) for k in a if torch.is_tensor(a[k]))


def test_reads_pixels_and_labels_in_the_order_of_names(folder, tmp_path):
    got = read(folder)
    assert got["classes"] == sorted(CLASSES)
    assert got["train_labels"].tolist() == [c for c in range(3) for _ in range(4)]
    index = sorted(CLASSES).index("dog") * 4 + 2
    pixels = write_image(tmp_path / "again.png", seed="test12")
    assert got["test_images"][index].contiguous().numpy().tobytes() == pixels
    assert got["train_images"].shape == (12, 32, 32, 3) and got["train_images"].dtype == torch.uint8


@pytest.mark.parametrize("name", [None, "deep/er/train"])
def test_archives_are_read_like_folders(folder, tmp_path, name):
    write_image(folder / "train" / "cat" / "more" / "a.png", seed="deeper")
    packed = tmp_path / "packed"
    packed.mkdir()
    for split, ending in (("train", "tar.gz"), ("test", "tar")):  # gzipped whatever its name
        pack(folder / split, packed / f"{split}.{ending}", name)
    assert same(read(packed), read(folder))
    assert sorted(os.listdir(packed)) == ["test.tar", "train.tar.gz"]


def test_grey_images_become_rgb_links_are_followed_and_other_files_are_ignored(folder):
    write_image(folder / "train" / "cat" / "grey.PNG", seed="g", mode="L")
    (folder / "train" / "cat" / "notes.txt").write_text("not an image")
    (folder / "train" / "cat" / "._0.png").write_text("what macOS leaves")
    (folder / "train" / "dog").rename(folder / "dogs")
    (folder / "train" / "dog").symlink_to("../dogs")
    got = read(folder)
    assert len(got["train_images"]) == 13
    grey = got["train_images"][got["train_labels"] == 1][-1]
    assert torch.equal(grey[..., 0], grey[..., 2])


def test_the_second_read_comes_from_the_cache_until_something_changes(folder, monkeypatch):
    first = read(folder)
    with monkeypatch.context() as patch:
        patch.setattr(data, "decode", lambda *_: pytest.fail("decoded again"))
        assert same(read(folder), first)
    write_image(folder / "train" / "cat" / "0.png", seed="other")
    assert not same(read(folder), first)


def jpeg(path, **options):
    """``path``, a JPEG of noise."""
    Image.frombytes("RGB", (32, 32), bytes(k * k % 251 for k in range(3072))).save(path, "JPEG", **options)
    return path


@pytest.mark.parametrize("options", [{}, {"progressive": True}], ids=str)
def test_jpegs_have_the_pixels_that_pillow_reads(tmp_path, options):
    path = jpeg(tmp_path / "whole", **options)
    with Image.open(path) as image:
        assert decode(path).numpy().tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize("ending", [b"", b"\xff\xd9"], ids=["cut", "ends early"])
def test_a_damaged_jpeg_is_named(tmp_path, ending):
    path = jpeg(tmp_path / "spoilt")
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"\xff\xda") + 120] + ending)
    with pytest.raises(UserError, match=f"^the image {path} cannot be decoded: "):
        decode(path)


def replaced_by(make):
    def spoil(folder):
        image = folder / "train" / "dog" / "3.png"
        image.unlink()
        make(image)

    return spoil


def archive_with(name):
    def spoil(folder):
        with tarfile.open(folder / "test.tar", "w") as archive:
            archive.add(folder / "test", arcname="test")
            archive.addfile(tarfile.TarInfo(name))
        (folder / "test").rename(folder.parent / "elsewhere")

    return spoil


def cut_archive(folder):
    (folder / "test.tar.gz").write_bytes(pack(folder / "test", folder.parent / "w.tgz").read_bytes()[:2000])
    (folder / "test").rename(folder.parent / "elsewhere")


def moved(name, to):
    return lambda folder: (folder / name).rename(folder.parent / to if "/" not in to else folder / to)


# what is spoilt -> how, and how the error begins
BAD = {
    "no folder": (moved(".", "x"), "{} is not a folder"),
    "no test": (moved("test", "x"), "{} holds neither a folder test nor test.tar.gz"),
    "an empty class": (lambda at: (at / "test" / "eel").mkdir(), "{}/test: Found no valid file for the classes eel."),
    "a stray image": (lambda at: write_image(at / "train" / "x.png", 1), "{}/train/x.png is in no class folder"),
    "other classes": (
        moved("test/dog", "test/wolf"),
        "the class folders of {0}/train and {0}/test differ (only in one: dog, wolf)",
    ),
    "another size": (
        lambda folder: write_image(folder / "test" / "cat" / "big.png", seed=1, size=(64, 48)),
        "the image {}/test/cat/big.png is 64x48: expected 32x32",
    ),
    "a device": (replaced_by(lambda image: image.symlink_to("/dev/zero")), "{}/train/dog/3.png is not a regular file"),
    "an empty image": (replaced_by(lambda image: image.touch()), "the image {}/train/dog/3.png cannot be decoded"),
    "an archive cut in the middle": (cut_archive, "cannot unpack {}/test.tar.gz: "),
    "no image in an archive": (archive_with("test/cat/x.png"), "the image {}/test.tar/cat/x.png cannot be decoded: "),
    "a path out of an archive": (archive_with("../x.png"), "cannot unpack {}/test.tar: "),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_folder_or_an_archive_is_named(folder, name):
    spoil, message = BAD[name]
    spoil(folder)
    with pytest.raises(UserError) as error:
        read(folder)
    assert "\n" not in str(error.value) and str(error.value).startswith(message.format(folder))
