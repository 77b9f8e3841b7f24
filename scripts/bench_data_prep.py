#!/usr/bin/env python3
"""How fast data preparation tokenises and splits into subwords, and how much memory a million pairs take.

``speed``: pairs a second of data-prep/encode.py beside the single-process command lines of sacremoses and subword-nmt,
on the same text, turn by turn; the CSV has the medians of the rounds and of their ratios to the command lines.
``memory``: the largest resident size of any process while data-prep/prepare-corpus.sh prepares so many pairs.
"""

import argparse
import csv
import itertools
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "data-prep"
BIN = Path(sys.executable).parent
PLAIN = "sacremoses, subword-nmt"


def call(*command, **options):
    subprocess.run([str(word) for word in command], check=True, **options)


def plain(text, lang, codes, folder):
    """What the tools' own command lines do, one process at a time."""
    with open(text) as source, open(folder / "plain.tok", "w") as target:
        call(BIN / "sacremoses", "-q", "-l", lang, "-j", 1, "tokenize", "-a", stdin=source, stdout=target)
    call(BIN / "subword-nmt", "apply-bpe", "-c", codes, "-i", folder / "plain.tok", "-o", folder / "plain")


def ours(text, lang, codes, folder, workers):
    common = ("--workers", workers)
    call(sys.executable, TOOLS / "encode.py", "moses", "--lang", lang, *common, text, folder / "ours.tok")
    call(
        sys.executable,
        TOOLS / "encode.py",
        "subword-nmt",
        "--model",
        codes,
        *common,
        folder / "ours.tok",
        folder / "ours",
    )


def speed(options, folder):
    texts = {lang: Path(f"{options.text}.{lang}") for lang in (options.src, options.tgt)}
    pairs = texts[options.src].read_bytes().count(b"\n")
    codes = folder / "codes"
    learn = ["subword-nmt", "--size", options.bpe_size, "--model", codes, *texts.values()]
    call(sys.executable, TOOLS / "learn_subwords.py", *learn)
    ways = {PLAIN: plain, **{f"encode.py, {n} workers": (lambda *a, n=n: ours(*a, n)) for n in options.workers}}
    rates = {name: [] for name in ways}
    for number in range(options.rounds):
        order = list(ways) if number % 2 == 0 else list(ways)[::-1]
        for name in order:
            start = time.perf_counter()
            for lang, text in texts.items():
                ways[name](text, lang, codes, folder)
            rates[name].append(pairs / (time.perf_counter() - start))
            print(f"round {number + 1}: {name}: {rates[name][-1]:,.0f} pairs/s", flush=True)
        assert (folder / "ours").read_bytes() == (folder / "plain").read_bytes(), "the results differ"
    for name, values in rates.items():
        ratio = statistics.median(value / other for value, other in zip(values, rates[PLAIN]))
        yield {
            "way": name,
            "pairs": pairs,
            "pairs_per_s": round(statistics.median(values), 1),
            "ratio": round(ratio, 3),
        }


def write_text(prefix, pairs, seed):
    """Pairs of lines of 5 to 45 words out of a million different ones, whose frequencies follow Zipf's law."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = ["".join(rng.choice(letters, size=length)) for length in rng.integers(2, 12, 1_000_000)]
    chances = 1 / np.arange(1, len(words) + 1)
    bounds = np.cumsum(chances / chances.sum())
    with open(f"{prefix}.en", "w") as source, open(f"{prefix}.de", "w") as target:
        for _ in range(pairs):
            length = int(rng.integers(5, 46))
            drawn = [words[i] for i in np.minimum(np.searchsorted(bounds, rng.random(2 * length)), len(words) - 1)]
            source.write(" ".join(drawn[:length]) + " .\n")
            target.write(" ".join(drawn[length:]) + " .\n")


def memory(options, folder):
    for name, pairs, seed in (("train", options.pairs, 1), ("valid", 1000, 2), ("test", 1000, 3)):
        write_text(folder / name, pairs, seed)
    start = time.perf_counter()
    splits = itertools.chain.from_iterable((f"--{name}", folder / name) for name in ("train", "valid", "test"))
    command = [TOOLS / "prepare-corpus.sh", "--src", "en", "--tgt", "de", *splits, "--bpe-size", options.bpe_size]
    call("bash", *command, folder / "out")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    yield {
        "pairs": options.pairs,
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "largest_process_mb": round(peak),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="CSV to write")
    parser.add_argument("--bpe-size", type=int, default=8000)
    kinds = parser.add_subparsers(dest="kind", required=True)
    of_speed = kinds.add_parser("speed")
    of_speed.add_argument("--text", required=True, help="prefix of two plain text files")
    of_speed.add_argument("--src", default="en")
    of_speed.add_argument("--tgt", default="de")
    of_speed.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    of_speed.add_argument("--rounds", type=int, default=5)
    kinds.add_parser("memory").add_argument("--pairs", type=int, default=1_000_000)
    options = parser.parse_args()
    machine = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("sacremoses", "subword-nmt")},
    }
    with tempfile.TemporaryDirectory() as folder:
        rows = [{**row, **machine} for row in {"speed": speed, "memory": memory}[options.kind](options, Path(folder))]
    with open(options.output, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(options.output.read_text(), end="")


if __name__ == "__main__":
    main()
