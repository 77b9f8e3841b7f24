"""Image folders that would hang, count images twice or lose what the images hold; caches with other content."""

import os
from pathlib import Path

import pytest
import torch
from PIL import Image
from vision_helpers import write_folder

from fairseq_rskip.errors import UserError
from fairseq_rskip.vision.imagefolder import decode, load_image_folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "bộ ảnh")


def refused(folder):
    with pytest.raises(UserError) as error:
        load_image_folder(folder, folder.parent / "cache")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_named_pipe_is_refused_by_name(folder):
    pipe = folder / "train" / "dog" / "pipe.png"
    os.mkfifo(pipe)
    assert refused(folder) == f"{pipe} is not a regular file: expected an image"


def test_a_named_pipe_for_an_archive_is_refused_by_name(folder):
    (folder / "test").rename(folder / "elsewhere")
    os.mkfifo(folder / "test.tar")
    assert refused(folder) == f"{folder}/test.tar is neither a folder nor a regular file"


def test_a_link_that_leads_nowhere_is_refused_by_name(folder):
    link = folder / "train" / "dog" / "gone.png"
    link.symlink_to("nowhere")
    assert refused(folder) == f"cannot read {link}: No such file or directory"


@pytest.mark.parametrize("target", ["..", ".", "../dog"])
def test_a_folder_that_is_there_twice_is_refused(folder, target):
    (folder / "train" / "cat" / "again").symlink_to(target)
    message = refused(folder)
    assert message.endswith(" are the same one: expected each only once") and f"{folder}/train" in message


def test_links_to_other_folders_are_followed(folder):
    (folder / "train" / "dog").rename(folder / "dogs")
    (folder / "train" / "dog").symlink_to("../dogs")
    assert len(load_image_folder(folder, folder.parent / "cache")["train_images"]) == 12


def picture(path, mode, **options):
    Image.new(mode, (32, 32)).save(path, **options)
    return path


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
    ],
)
def test_what_rgb_would_lose_is_refused_by_name(folder, name, mode, options, problem):
    image = picture(folder / "train" / "cat" / name, mode, **options)
    expected = "expected RGB, grey or palette, 8 bits a channel, not transparent"
    assert refused(folder) == f"the image {image} {problem}: {expected}"


def test_rgb_of_16_bits_is_refused_though_pillow_calls_it_rgb(tmp_path):
    """A PNG written by hand: Pillow writes none, and drops the low bytes as it reads one."""
    import struct
    import zlib

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 32, 32, 16, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes(32 * 6)) * 32)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(png)
    with Image.open(tmp_path / "a.png") as image:
        assert image.mode == "RGB"
    with pytest.raises(UserError, match="the image deep has 16 or more bits a channel"):
        decode(png, "deep")
    with pytest.raises(UserError, match="the image deep has 16 or more bits a channel"):
        decode(b"P6 32 32 65535\n" + bytes(32 * 32 * 6), "deep")
    for values in (b"200", b"255"):
        assert decode(b"P6 32 32 " + values + b"\n" + bytes(32 * 32 * 3), "shallow").shape == (32, 32, 3)


@pytest.mark.parametrize("name, mode", [("a.png", "1"), ("a.png", "L"), ("a.png", "P"), ("a.jpg", "CMYK")])
def test_other_modes_are_read(tmp_path, name, mode):
    assert decode(picture(tmp_path / name, mode).read_bytes(), name).shape == (32, 32, 3)


@pytest.mark.parametrize("content", ["list", "key", "shape", "label"])
def test_a_cache_with_other_content_is_made_anew(folder, capsys, content):
    cache = folder.parent / "cache"
    first = load_image_folder(folder, cache)
    (kept,) = Path(cache).iterdir()
    stored = torch.load(kept, weights_only=True)
    spoilt = {
        "list": [1, 2],
        "key": {"classes": ["cat"]},
        "shape": {**stored, "train_images": stored["train_images"][:-1]},
        "label": {**stored, "test_labels": stored["test_labels"] + 1},
    }
    torch.save(spoilt[content], kept)
    again = load_image_folder(folder, cache)
    assert torch.equal(again["train_images"], first["train_images"]) and again["classes"] == first["classes"]
    assert f"warning: {kept} does not hold decoded images; reading" in capsys.readouterr().err
