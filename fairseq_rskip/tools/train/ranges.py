"""The values that fairseq-train takes and no training can mean, in one table; checked before anything is imported."""

import argparse
import math
from typing import Any, Callable, Dict, List

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.console import finite, whole_number


def between(least: float, below: float, open_below: bool = False) -> Callable[[str], float]:
    """A type for argparse: numbers from ``least`` on (above it, if ``open_below``) that are less than ``below``."""

    def convert(text: str) -> float:
        value = finite(text)
        if not (least < value < below if open_below else least <= value < below):
            start = "above" if open_below else "of at least"
            end = f" and below {below:g}" if below < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {start} {least:g}{end}")
        return value

    return convert


def each(convert: Callable[[str], Any]) -> Callable[[str], List]:
    """A type for argparse: such values, separated by commas: one an epoch."""
    return lambda text: [convert(part) for part in text.strip("[]").split(",")]


def not_empty(text: str) -> str:
    """A type for argparse: any text but none."""
    if not text.strip():
        raise argparse.ArgumentTypeError("needs a value: it is empty")
    return text


COUNT, WHOLE, SHARE = whole_number(1), whole_number(0), between(0, 1)
SIZES = ("layers", "embed-dim", "ffn-embed-dim", "attention-heads")
RANGES: Dict[str, Callable[[str], Any]] = {
    "save-dir": not_empty,
    "lr": each(between(0, math.inf, open_below=True)),
    "update-freq": each(COUNT),
    **dict.fromkeys("max-tokens max-tokens-valid batch-size log-interval save-interval".split(), COUNT),
    **dict.fromkeys([f"{side}-{size}" for side in ("encoder", "decoder") for size in SIZES], COUNT),
    **dict.fromkeys(["max-source-positions", "max-target-positions"], COUNT),
    **dict.fromkeys("max-epoch max-update warmup-updates save-interval-updates seed".split(), WHOLE),
    **dict.fromkeys("dropout attention-dropout activation-dropout relu-dropout label-smoothing".split(), SHARE),
    **dict.fromkeys(["encoder-layerdrop", "decoder-layerdrop"], SHARE),
    **dict.fromkeys(["weight-decay", "clip-norm"], between(0, math.inf)),
}


def check_ranges(words: List[str]) -> None:
    """Raises ``UserError`` for a value among fairseq-train's options ``words`` that is outside its range."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, convert in RANGES.items():
        parser.add_argument(f"--{name}", type=convert)

    def fail(message: str) -> None:
        raise UserError(message.replace("argument ", "", 1))

    parser.error = fail
    parser.parse_known_args(words)
