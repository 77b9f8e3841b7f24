"""Image folders and archives: what is read and kept, what is refused and how it is said."""

import io
import os
import tarfile

import pytest
import torch
from vision_helpers import CLASSES, pack, write_folder, write_image

from fairseq_rskip.errors import UserError
from fairseq_rskip.vision import imagefolder
from fairseq_rskip.vision.imagefolder import load_image_folder


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
    for split, ending in (("train", "tar.gz"), ("test", "tar")):  # gzipped whatever its name
        pack(folder / split, packed / f"{split}.{ending}", name)
    assert same(read(packed), read(folder))
    assert sorted(os.listdir(packed)) == ["test.tar", "train.tar.gz"]


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
    assert same(read(folder), first)
    assert f"warning: {kept} does not hold decoded images: cannot read" in capsys.readouterr().err
    torch.save({"classes": ["cat"]}, kept)
    assert same(read(folder), first) and f"warning: {kept} does not hold" in capsys.readouterr().err
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


BAD_FOLDERS = {
    "no folder": (gone, "{} is not a folder: expected one that holds train and test"),
    "no test": (without_test, "{} holds neither a folder test nor test.tar.gz, test.tgz, test.tar"),
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
        "the class folders of {0}/train and {0}/test differ (only in train: dog)",
    ),
    "another size": (
        lambda folder: write_image(folder / "test" / "cat" / "big.png", seed=1, size=(64, 48)),
        "the image {}/test/cat/big.png is 64x48: expected 32x32",
    ),
    "a dangling link": (
        lambda folder: (folder / "train" / "dog" / "gone.png").symlink_to("nowhere"),
        "cannot read {}/train/dog/gone.png: No such file or directory",
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
        "{}/test.tar:test/cat/x.png is not a regular file: expected",
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
