"""Image folders and archives: what is read and kept, what is refused and how it is said."""

import gzip
import io
import os
import shutil
import struct
import sys
import tarfile
import zlib

import pytest
import torch
from conftest import ROOT, run_command
from PIL import Image
from vision_helpers import CLASSES, pack, write_folder, write_image

from fairseq_rskip.errors import UserError
from fairseq_rskip.vision import image_files
from fairseq_rskip.vision.data import load_image_folder
from fairseq_rskip.vision.image_files import decode

HAS_FILTERS = hasattr(tarfile, "data_filter")  # not in Python 3.11.2, that of Debian 12
needs_filters = pytest.mark.skipif(not HAS_FILTERS, reason="this Python unpacks no archive safely")


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "bộ ảnh")


def read(folder):
    return vars(load_image_folder(folder, folder.parent / "cache"))


def same(a, b):
    return a["classes"] == b["classes"] and all(
        torch.equal(a[k], b[k]) for k in a if torch.is_tensor(a[k])
    )


def test_reads_pixels_and_labels_in_the_order_of_names(folder, tmp_path):
    got = read(folder)
    assert got["classes"] == sorted(CLASSES)
    assert got["train_labels"].tolist() == [c for c in range(3) for _ in range(4)]
    index = sorted(CLASSES).index("dog") * 4 + 2
    pixels = write_image(tmp_path / "again.png", seed="test12")
    assert got["test_images"][index].contiguous().numpy().tobytes() == pixels
    assert got["train_images"].shape == (12, 32, 32, 3) and got["train_images"].dtype == torch.uint8


@needs_filters
@pytest.mark.parametrize("name", [None, "deep/er/train"])
def test_archives_are_read_like_folders(folder, tmp_path, name):
    write_image(folder / "train" / "cat" / "more" / "a.png", seed="deeper")
    packed = tmp_path / "packed"
    packed.mkdir()
    for split, ending in (("train", "tar.gz"), ("test", "tar")):  # gzipped whatever its name
        pack(folder / split, packed / f"{split}.{ending}", name)
    assert same(read(packed), read(folder))
    assert sorted(os.listdir(packed)) == ["test.tar", "train.tar.gz"]


def test_grey_images_become_rgb_and_other_files_are_ignored(folder):
    write_image(folder / "train" / "cat" / "grey.PNG", seed="g", mode="L")
    (folder / "train" / "cat" / "notes.txt").write_text("not an image")
    (folder / "train" / "cat" / "._0.png").write_text("what macOS leaves")
    image = folder / "train" / "dog" / "0.png"
    image.rename(folder / "0.png")
    image.symlink_to("../../0.png")
    got = read(folder)
    assert len(got["train_images"]) == 13
    grey = got["train_images"][got["train_labels"] == 1][-1]
    assert torch.equal(grey[..., 0], grey[..., 2])


@pytest.mark.parametrize("channels", [1, 2, 3, 4], ids=["grey", "grey+a", "rgb", "rgba"])
def test_an_image_of_sixteen_bits_is_refused(folder, channels):
    """Pillow reads all but the first as 8 bits; it writes none of the others, so this does."""
    colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = (b"\0" + bytes(2 * channels * 32)) * 32
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", 32, 32, 16, colour, 0, 0, 0),
        b"IDAT": zlib.compress(rows),
        b"IEND": b"",
    }
    png = b"\x89PNG\r\n\x1a\n"
    for name, data in parts.items():
        png += struct.pack(">I", len(data)) + name + data
        png += struct.pack(">I", zlib.crc32(name + data))
    (folder / "train" / "cat" / "deep.png").write_bytes(png)
    with pytest.raises(UserError, match=r"deep\.png has 16 bits a channel: expected 8"):
        read(folder)


@pytest.mark.parametrize("header", ["P6 32 32 1023", "P6 32 32 65535"])
def test_a_ppm_in_colour_with_more_than_eight_bits_is_refused(folder, header):
    """Pillow reads it as 8 bits."""
    bits = int(header.split()[-1]).bit_length()
    image = folder / "train" / "cat" / "deep.ppm"
    image.write_bytes(header.encode() + b"\n" + bytes(6 * 32 * 32))
    with pytest.raises(UserError, match=rf"deep\.ppm has {bits} bits a channel: expected 8"):
        read(folder)
    image.write_bytes(b"P6 32 32 255\n" + bytes(3 * 32 * 32))
    assert len(read(folder)["train_images"]) == 13


def test_the_second_read_comes_from_the_cache_until_something_changes(folder, monkeypatch):
    first = read(folder)
    with monkeypatch.context() as patch:
        patch.setattr(image_files, "decode", lambda *_: pytest.fail("decoded again"))
        assert same(read(folder), first)
    write_image(folder / "train" / "cat" / "0.png", seed="other")
    assert not same(read(folder), first)


def test_a_damaged_cache_is_made_again(folder, capsys):
    first = read(folder)
    (cached,) = (folder.parent / "cache").glob("*.pt")
    whole = cached.read_bytes()
    cached.write_bytes(whole[:1000])
    assert same(read(folder), first)
    assert f"{cached}: truncated, or not a checkpoint" in capsys.readouterr().err
    assert len(cached.read_bytes()) == len(whole)


def jpeg(path, **options):
    """``path``, a JPEG of noise."""
    Image.frombytes("RGB", (32, 32), bytes(k * k % 251 for k in range(3072))).save(
        path, "JPEG", **options
    )
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
    path.write_bytes(b"no image")
    with pytest.raises(UserError, match=f"{path} cannot be decoded: Pillow knows no such format$"):
        decode(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match=f"^the image {path} is empty: expected an image$"):
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
    (folder / "test.tar.gz").write_bytes(
        pack(folder / "test", folder.parent / "w.tgz").read_bytes()[:2000]
    )
    (folder / "test").rename(folder.parent / "elsewhere")


def moved(name, to):
    return lambda folder: (folder / name).rename(
        folder.parent / to if "/" not in to else folder / to
    )


SPLITS = ("train", "test")
# what is spoilt -> how, and how the error begins
BAD = {
    "no folder": (moved(".", "x"), "{} does not exist; expected a folder"),
    "no test": (moved("test", "x"), "{} holds neither a folder test nor test.tar.gz"),
    "an empty class": (
        lambda at: (at / "test" / "eel").mkdir(),
        "{}/test/eel holds no image: expected test/<class>/<image>",
    ),
    "one class": (
        lambda at: [shutil.rmtree(at / split / name) for split in SPLITS for name in CLASSES[1:]],
        "{}/train has one class, cat: expected two or more",
    ),
    "a stray image": (
        lambda at: write_image(at / "train" / "x.png", 1),
        "{}/train/x.png is in no class folder",
    ),
    "other classes": (
        moved("test/dog", "test/wolf"),
        "the class folders of {0}/train and {0}/test differ (only in one: dog, wolf)",
    ),
    "another size": (
        lambda folder: write_image(folder / "test" / "cat" / "big.png", seed=1, size=(64, 48)),
        "the image {}/test/cat/big.png is 64x48: expected 32x32",
    ),
    "a device": (
        replaced_by(lambda image: image.symlink_to("/dev/zero")),
        "{}/train/dog/3.png is not a regular file",
    ),
    "an empty image": (
        replaced_by(lambda image: image.touch()),
        "the image {}/train/dog/3.png is empty",
    ),
    "an archive cut in the middle": (cut_archive, "cannot unpack {}/test.tar.gz: "),
    "no image in an archive": (
        archive_with("test/cat/x.png"),
        "the image {}/test.tar/cat/x.png is empty",
    ),
    "a path out of an archive": (archive_with("../x.png"), "cannot unpack {}/test.tar: "),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_folder_or_an_archive_is_named(folder, name):
    spoil, message = BAD[name]
    if name in ("no image in an archive", "a path out of an archive") and not HAS_FILTERS:
        message = "this Python cannot unpack "
    spoil(folder)
    with pytest.raises(UserError) as error:
        read(folder)
    assert "\n" not in str(error.value) and str(error.value).startswith(message.format(folder))


def test_links_to_folders_are_not_followed(folder, capsys):
    before = read(folder)
    (folder / "train" / "cat" / "loop").symlink_to("..")
    (folder / "train" / "copy").symlink_to("cat")
    assert same(read(folder), before)
    skipped = capsys.readouterr().err
    assert f"not followed: {folder}/train/cat/loop is skipped" in skipped
    assert f"not followed: {folder}/train/copy is skipped" in skipped


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "a\u2028b"], ids=["line", "escape", "u2028"])
def test_class_names_with_control_characters_are_refused(folder, name):
    (folder / "train" / "cat").rename(folder / "train" / name)
    with pytest.raises(UserError, match="has a control character") as error:
        read(folder)
    assert str(error.value).isprintable()


def png_header(width, height):
    """A PNG of zeros that claims ``width`` x ``height``; its checksums are right."""

    def chunk(kind, data):
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def jpeg_header(width, height):
    """A small JPEG whose frame header claims ``width`` x ``height``."""
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32)).save(buffer, "JPEG")
    data = bytearray(buffer.getvalue())
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def bmp_header(width, height):
    return b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, width, height, 1, 24, *[0] * 6)


def webp_header(width, height):
    """An animated WebP's canvas, without a frame."""
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunk = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + canvas
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def tiff_header(width, height, more=()):
    entries = [(256, width), (257, height), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1)]
    entries += more
    packed = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + packed + bytes(4)


HUGE = {
    "jpg": (jpeg_header(65500, 65500), "65500x65500"),
    "png": (png_header(13000, 13000), "13000x13000"),
    "bmp": (bmp_header(13000, 13000), "13000x13000"),
    "ppm": (b"P6 13000 13000 255\n" + bytes(100), "13000x13000"),
    "webp": (webp_header(16000, 16000), "16000x16000"),
    "tiff": (tiff_header(13000, 13000), "13000x13000"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("kind", HUGE)
def test_a_header_that_claims_a_huge_image_is_refused(tmp_path, kind):
    content, size = HUGE[kind]
    path = tmp_path / f"huge.{kind}"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        decode(path)
    assert str(error.value) == f"the image {path} is {size}: expected 32x32"


def test_a_tiff_whose_tiles_are_huge_is_refused(tmp_path):
    path = tmp_path / "tiles.tiff"
    path.write_bytes(tiff_header(32, 32, more=[(322, 60000), (323, 60000), (324, 8)]))
    with pytest.raises(UserError, match="its tiles have more than 1024 pixels a side$"):
        decode(path)


def test_refusing_huge_images_takes_no_memory_for_their_pixels(tmp_path):
    for kind, (content, _) in HUGE.items():
        (tmp_path / f"huge.{kind}").write_bytes(content)
    code = """if True:
        import pathlib, resource, sys, warnings
        warnings.simplefilter("ignore")
        from fairseq_rskip.errors import UserError
        from fairseq_rskip.vision.image_files import decode
        import simplejpeg, PIL.Image
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        before, refused = peak(), 0
        for path in pathlib.Path(sys.argv[1]).iterdir():
            try:
                decode(path)
            except UserError:
                refused += 1
        print(refused, (peak() - before) // 1024)
    """
    done = run_command([sys.executable, "-c", code, tmp_path])
    refused, mebibytes = map(int, done.stdout.split())
    assert refused == len(HUGE) and mebibytes < 100


def test_a_large_image_file_is_not_read(tmp_path):
    path = tmp_path / "large.png"
    with open(path, "wb") as file:
        file.truncate(image_files.MAX_IMAGE_BYTES + 1)
    with pytest.raises(UserError, match="has more than 16 MiB$"):
        decode(path)


def tar_of_zeros(path, size, kind=tarfile.REGTYPE):
    """A gzipped tar whose only entry has ``size`` zeros, written a mebibyte at a time."""
    entry = tarfile.TarInfo("cat/0.png")
    entry.size, entry.type = size, kind
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(entry.tobuf(tarfile.GNU_FORMAT))
        for _ in range(size // 2**20):
            file.write(bytes(2**20))


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE], ids=["file", "header"])
def test_an_archive_that_unpacks_to_too_much_is_refused(folder, monkeypatch, kind):
    """With a limit of 4 MiB instead of 1,024."""
    (folder / "test").rename(folder.parent / "elsewhere")
    tar_of_zeros(folder / "test.tar.gz", 8 * 2**20, kind)
    assert (folder / "test.tar.gz").stat().st_size < 2**17
    monkeypatch.setattr(image_files, "MAX_ARCHIVE_BYTES", 4 * 2**20)
    with pytest.raises(UserError) as error:
        read(folder)
    assert "test.tar.gz unpacks to more than 4 MiB or 250,000 entries" in str(error.value)


def test_an_archive_of_too_many_entries_is_refused(folder, monkeypatch):
    pack(folder / "test", folder / "test.tar.gz")
    (folder / "test").rename(folder.parent / "elsewhere")
    monkeypatch.setattr(image_files, "MAX_ARCHIVE_ENTRIES", 10)
    with pytest.raises(UserError, match="or 10 entries: unpack it yourself"):
        read(folder)


def test_the_limits_are_those_of_the_docs():
    text = (ROOT / "docs" / "cifar.md").read_text("utf-8")
    assert image_files.MAX_ARCHIVE_BYTES == 2**30 and "1,024 MiB" in text
    assert image_files.MAX_ARCHIVE_ENTRIES == 250_000 and "250,000 entries" in text
    assert image_files.MAX_IMAGE_BYTES == 16 * 2**20 and "16 MiB" in text
