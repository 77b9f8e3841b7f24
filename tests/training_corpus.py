"""The tiny corpus as data preparation leaves a corpus, for the tests of scripts/train.sh."""

import json
import shutil


def prepare(tiny_corpus, tmp_path):
    """A copy of the tiny corpus, called numbers, in a folder with a space and an umlaut; returns the folder."""
    folder = tmp_path / "ein Körper"
    shutil.copytree(tiny_corpus, folder / "data-bin")
    about = {"corpus": "numbers", "src": "src", "tgt": "tgt", "joined_dictionary": True}
    (folder / "data-bin" / "preparation.json").write_text(json.dumps(about))
    return folder
