"""A corpus as data preparation leaves it, small enough to learn something from in seconds."""

import io
import json
import random

from conftest import run_checked, run_command
from sacremoses import MosesTokenizer
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from fairseq_rskip.tools.process import explain

TRAINING = (
    "--arch transformer_rskip_ln_tiny --encoder-layers 1 --decoder-layers 1 "
    "--share-all-embeddings --dropout 0 --optimizer adam --lr 0.01 --lr-scheduler inverse_sqrt "
    "--warmup-updates 20 --max-tokens 800 --max-epoch 24 --save-interval 4 "
    "--criterion label_smoothed_cross_entropy --label-smoothing 0.1 --seed 3 --cpu --num-workers 0"
).split()
SIZES = {"train": 400, "valid": 20, "test": 33}
WORDS = dict(house="Haus", car="Auto", sign="Schild", picture="Bild", dress="Kleid") | {
    "wall paint": "Wandfarbe"
}
COLOURS = {
    "black-and-white": "schwarz-weißes",
    "dark-green": "dunkel-grünes",
    "red": "rotes",
    "orange": "orangenes",
}


def sentence(rng):
    """Return an English and a German sentence, plain text.

    They have quotes, an apostrophe, hyphens, an ampersand.
    """
    word, colour, number = rng.choice(sorted(WORDS)), rng.choice(sorted(COLOURS)), rng.randint(2, 9)
    pairs = [
        (f'She said: "A {colour} {word}."', f'Sie sagte: "Ein {COLOURS[colour]} {WORDS[word]}."'),
        (
            f"It's a {colour} {word}, isn't it?",
            f"Das ist ein {COLOURS[colour]} {WORDS[word]}, oder?",
        ),
        (f"{number} & {number} for a {word}!", f"{number} & {number} für ein {WORDS[word]}!"),
    ]
    return rng.choice(pairs)


def prepare(folder):
    """DATA with raw/, dictionaries, binarised splits and preparation.json; returns ``folder``."""
    rng = random.Random(7)
    work = folder / "work"
    (folder / "raw").mkdir(parents=True)
    work.mkdir()
    tokenizers = {language: MosesTokenizer(lang=language) for language in ("en", "de")}
    for split, size in SIZES.items():
        for language, lines in zip(("en", "de"), zip(*(sentence(rng) for _ in range(size)))):
            tokens = [
                tokenizers[language].tokenize(s, return_str=True, aggressive_dash_splits=True)
                for s in lines
            ]
            write(folder / "raw" / f"{split}.{language}", lines)
            write(work / f"{split}.{language}", tokens)
    apply_subwords(work, folder.parent / "subwords" / "model")
    prefixes = [option for split in SIZES for option in (f"--{split}pref", work / f"{split}.bpe")]
    options = ["-s", "en", "-t", "de", "--joined-dictionary", "--destdir", folder]
    run_checked(["fairseq-preprocess", *options, *prefixes])
    about = {"corpus": "own", "src": "en", "tgt": "de", "bpe": "subword-nmt", "tokenizer": "moses"}
    (folder / "preparation.json").write_text(
        json.dumps({**about, "joined_dictionary": True}), encoding="utf-8"
    )
    return folder


def apply_subwords(work, model):
    """Learn subword-nmt's joint subwords into ``model``.

    <split>.bpe.<language> is made of <split>.<language>.
    """
    joined = [line for language in ("en", "de") for line in read(work / f"train.{language}")]
    codes = io.StringIO()
    learn_bpe(joined, codes, 120)
    model.parent.mkdir(parents=True, exist_ok=True)
    model.write_text(codes.getvalue(), encoding="utf-8")
    codes.seek(0)
    bpe = BPE(codes)
    for split in SIZES:
        for language in ("en", "de"):
            write(
                work / f"{split}.bpe.{language}",
                map(bpe.process_line, read(work / f"{split}.{language}")),
            )


def read(path):
    return path.read_text(encoding="utf-8").splitlines()


def write(path, lines):
    """``lines`` as ``path``, which is returned, in folders that are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def follow_in_server(command, on_line, log):
    """``tools.process.follow`` for tests of what is around fairseq: the server runs the command."""
    done = run_command(command)
    for line in (done.stdout + done.stderr).encode().splitlines(keepends=True):
        log.write(line)
        on_line(line)
    return explain(done.returncode, done.stdout + done.stderr)
