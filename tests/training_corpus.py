"""The tiny corpus as data preparation leaves one, longer sentences, and plans.

This is for the tests of scripts/train.sh.
"""

import json
import shlex
import shutil
from types import SimpleNamespace

import torch
from conftest import ROOT
from fairseq import options
from fairseq.data import indexed_dataset

from fairseq_rskip.tools.__main__ import main

SCRIPT = ROOT / "scripts" / "train.sh"
TINY = "transformer_rskip_ln_tiny"
LITTLE = "--max-tokens 600 --lr 0.005 --warmup-updates 10 --encoder-embed-dim 32".split()
STARTING = "starting: reading the options and the data takes some seconds"


def prepare(tiny_corpus, tmp_path):
    """Copy the tiny corpus, called numbers, to a folder with a space and an umlaut.

    Returns the folder.
    """
    folder = tmp_path / "ein Körper"
    shutil.copytree(tiny_corpus, folder / "data-bin")
    about = {"corpus": "numbers", "src": "src", "tgt": "tgt", "joined_dictionary": True}
    (folder / "data-bin" / "preparation.json").write_text(json.dumps(about))
    return folder


def lengthen(prefix, number, tokens):
    """Give sentence ``number``, counted from 1, of the binarised ``prefix`` so many tokens.

    Its end is counted.
    """
    old = indexed_dataset.make_dataset(str(prefix), "mmap")
    items = [old[index].clone() for index in range(len(old))]
    items[number - 1] = torch.cat(
        [items[number - 1][:1].repeat(tokens - 1), items[number - 1][-1:]]
    )
    del old
    builder = indexed_dataset.make_builder(f"{prefix}.bin", "mmap", vocab_size=100)
    for item in items:
        builder.add_item(item)
    builder.finalize(f"{prefix}.idx")


def planner(capsys):
    """Return a function that plans in this process, with train.sh's arguments.

    ``words`` of what it returns is the command without the program, ``args`` how fairseq parses it.
    """

    def plan(*argv):
        status = main(["train", *map(str, argv)])
        out, err = capsys.readouterr()
        words = shlex.split(out)[1:]
        args = (
            options.parse_args_and_arch(options.get_training_parser(), list(words))
            if words
            else None
        )
        return SimpleNamespace(status=status, err=err, out=out, words=words, args=args)

    return plan


def refused(result, *parts):
    """One line on stderr that has every one of ``parts``."""
    assert (result.status, result.out) == (1, "")
    (line,) = [
        line for line in result.err.splitlines() if "| INFO |" not in line and line != STARTING
    ]
    assert line.startswith("error: ") and all(part in line for part in parts), line
