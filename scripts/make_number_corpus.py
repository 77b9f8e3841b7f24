#!/usr/bin/env python3
"""Write a parallel English-Vietnamese corpus of spelled-out numbers.

Its files are {train,valid,test}.{en,vi}, with one pair a line.
"""

import random
import sys
from pathlib import Path

from fairseq_rskip.console import Parser, whole_number
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import write_text

DIGITS, SEED = 6, 1  # digits of the longest number; seed of the drawing
HELD_OUT = 500  # pairs in valid, and in test


def draw_numbers(count: int) -> list[int]:
    """``count`` different numbers of 1 to ``DIGITS`` digits.

    Each length is equally likely; there are few short numbers, and all of them are soon drawn.
    Raises ``UserError`` for more than half of all such numbers.
    """
    if count > 10**DIGITS // 2:
        raise UserError(
            f"{count} pairs of at most {DIGITS} digits: at most {10**DIGITS // 2} are possible"
        )
    generator = random.Random(SEED)
    seen = {}  # a dict keeps the order of drawing
    while len(seen) < count:
        length = generator.randint(1, DIGITS)
        least = 10 ** (length - 1) if length > 1 else 0
        seen[generator.randrange(least, 10**length)] = None
    numbers = list(seen)
    # short numbers come early in the drawing, and every split shall have some
    generator.shuffle(numbers)
    return numbers


def spell(number: int) -> tuple[str, str]:
    """The number in English and in Vietnamese, as lower-case words separated by single blanks."""
    from num2words import num2words

    english = num2words(number, lang="en").replace("-", " ").replace(",", "")
    return " ".join(english.split()), " ".join(num2words(number, lang="vi").split())


def make(argv=None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the files go; made when missing")
    parser.add_argument(
        "--train", type=whole_number(1), default=20_000, metavar="N", help="pairs in train (20000)"
    )
    options = parser.parse_args(argv)
    sizes = {"train": options.train, "valid": HELD_OUT, "test": HELD_OUT}
    numbers = draw_numbers(sum(sizes.values()))
    options.folder.mkdir(parents=True, exist_ok=True)
    for split, size in sizes.items():
        pairs = [spell(number) for number in numbers[:size]]
        del numbers[:size]
        for language, lines in zip(("en", "vi"), zip(*pairs)):
            write_text(
                options.folder / f"{split}.{language}", "".join(line + "\n" for line in lines)
            )
        print(f"{options.folder / split}.{{en,vi}}: {size} pairs")


if __name__ == "__main__":
    sys.exit(exit_status(make))
