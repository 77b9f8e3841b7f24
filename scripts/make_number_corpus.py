#!/usr/bin/env python3
"""Write a parallel English-Vietnamese corpus of spelled-out numbers: {train,valid,test}.{en,vi}, one pair a line.

No download is needed, a small Transformer learns it in minutes on a CPU, and what it must learn is real:
"one hundred and five" is "một trăm lẻ năm" but "twenty five" is "hai mươi lăm".
"""

import argparse
import os
import random
import sys
from pathlib import Path

try:
    from num2words import num2words
except ImportError:
    sys.exit("error: num2words is missing; pip install num2words, or run this through make demo")

SPLITS = ("train", "valid", "test")


def draw_numbers(count: int, digits: int, seed: int) -> list:
    """``count`` different numbers of 1 to ``digits`` digits, every length as often as the others while it lasts.

    Drawn evenly from 0 ... 999999, nine in ten would have six digits. Raises ValueError where more than
    half of all such numbers are asked for.
    """
    if count > 10**digits // 2:
        raise ValueError(f"{count} pairs of at most {digits} digits: at most {10**digits // 2} are possible")
    generator = random.Random(seed)
    seen = {}  # a dict keeps the order of drawing
    while len(seen) < count:
        length = generator.randint(1, digits)
        seen[generator.randrange(10 ** (length - 1) if length > 1 else 0, 10**length)] = None
    numbers = list(seen)
    generator.shuffle(numbers)  # short numbers come early in the drawing; every split shall have some
    return numbers


def spell(number: int) -> tuple:
    """The number in English and in Vietnamese, as lower-case words separated by single blanks."""
    english = num2words(number, lang="en").replace("-", " ").replace(",", "")
    return " ".join(english.split()), " ".join(num2words(number, lang="vi").split())


def write_lines(path: Path, lines) -> None:
    """Under its own name only when complete, so that an interruption leaves no half file."""
    new = path.with_name(path.name + ".new")
    new.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    os.replace(new, path)


def positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return value


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the files go; made when missing")
    for split, size in zip(SPLITS, (20000, 500, 500)):
        parser.add_argument(f"--{split}", type=positive, default=size, metavar="N", help=f"pairs in {split}")
    parser.add_argument("--digits", type=positive, default=6, metavar="N", help="length of the longest number, up to 9")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same corpus")
    options = parser.parse_args(argv)
    if options.digits > 9:
        parser.error(f"--digits: must be 1 to 9, not {options.digits}")
    sizes = [getattr(options, split) for split in SPLITS]
    try:
        numbers = draw_numbers(sum(sizes), options.digits, options.seed)
        options.folder.mkdir(parents=True, exist_ok=True)
        for split, size in zip(SPLITS, sizes):
            pairs = [spell(number) for number in numbers[:size]]
            del numbers[:size]
            for language, lines in zip(("en", "vi"), zip(*pairs)):
                write_lines(options.folder / f"{split}.{language}", lines)
            print(f"{options.folder / split}.{{en,vi}}: {size} pairs")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
