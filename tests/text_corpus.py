"""A text of letters for the tests of language models, and models trained on it.

The text is prepared as a user prepares one.
"""

import random

from conftest import LETTERS, ROOT, run_checked

TRAINING = (
    "--task language_modeling --tokens-per-sample 32 --sample-break-mode none --batch-size 8 "
    "--optimizer adam --lr 0.005 --lr-scheduler inverse_sqrt --warmup-updates 10 --cpu "
    "--num-workers 0 --log-format json "
    "--max-update 60 --validate-interval-updates 30 --no-progress-bar --no-epoch-checkpoints"
).split()
PLUGIN = ["--user-dir", str(ROOT / "fairseq_rskip")]


def write_text(path):
    """Write 100 documents of 3 lines.

    In them a letter's successor in the alphabet, mostly, follows it.
    """
    rng = random.Random(1)
    with open(path, "w", encoding="utf-8") as file:
        for line in range(300):
            start = rng.randrange(10)
            words = [
                LETTERS[(start + i) % 10] if rng.random() < 0.9 else rng.choice(LETTERS)
                for i in range(12)
            ]
            file.write(" ".join(words) + "\n" * (1 + (line % 3 == 2)))


def prepare(folder):
    """The data-bin of the text; its words are its subwords."""
    folder.mkdir(parents=True)
    write_text(folder / "letters.txt")
    options = [
        "--lang",
        "en",
        "--held-out",
        "0.1",
        "--bpe",
        "none",
        "--tokenizer",
        "none",
        "--workers",
        1,
    ]
    run_checked(
        [
            "python",
            "-m",
            "fairseq_rskip.tools",
            "prepare",
            "--text",
            folder / "letters.txt",
            *options,
            folder,
        ]
    )
    return folder / "data-bin"


def train(data, folder, arch, *options):
    """Train ``transformer_lm_<arch>`` on ``data``; returns the log."""
    command = [
        "fairseq-train",
        data,
        *PLUGIN,
        "--arch",
        f"transformer_lm_{arch}",
        *TRAINING,
        *options,
    ]
    return run_checked([*command, "--save-dir", folder])
