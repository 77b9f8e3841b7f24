"""What the tests of data-prep/fetch.py share: a loopback server, and a list with a folder to fetch into."""

import gzip
import hashlib
import random
import sys

import pytest
from conftest import ROOT
from loopback import Loopback

SCRIPT = ROOT / "data-prep" / "fetch.py"
sys.path.insert(0, str(SCRIPT.parent))
import checksums  # noqa: E402, F401
import download  # noqa: E402
import fetch  # noqa: E402

DATA = gzip.compress(random.Random(1).randbytes(300_000))
OTHER = gzip.compress(random.Random(2).randbytes(300_000))
FALSE = OTHER[:-8] + DATA[-8:]  # of the right size
SIZE, SHA = len(DATA), "sha256:" + hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def server():
    with Loopback() as server:
        yield server


class Place:
    """A list and a folder to fetch into, with a space and letters beyond ASCII in their paths."""

    def __init__(self, root, capsys):
        self.root = root / "dữ liệu é"
        self.root.mkdir()
        self.list, self.lock = self.root / "list.tsv", self.root / "checksums.lock"
        self.folder = self.root / "ar chives"
        self._capsys = capsys

    def row(self, *urls, name="a.gz", size=SIZE, checksum=SHA):
        with open(self.list, "a", encoding="utf-8") as file:
            file.write("\t".join([name, str(size), checksum, *urls]) + "\n")

    def fetch(self, *options):
        """Exit status, stdout, stderr."""
        self._capsys.readouterr()
        status = fetch.main([str(self.list), str(self.folder), *map(str, options)])
        return (status, *self._capsys.readouterr())

    def fails(self, *options):
        """The one line on stderr of a run that must fail."""
        status, _, error = self.fetch("--retries", 0, "--stall", 1, *options)
        assert status == 1 and error.startswith("error: ") and len(error.splitlines()) == 1, error
        assert not (self.folder / "a.gz").exists()
        return error

    def files(self):
        return {path.name: path.read_bytes() for path in self.folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture
def place(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(download, "RETRY_DELAY", 0.01)
    return Place(tmp_path, capsys)
