"""Shared by all command lines: mistakes in one line, number types, progress, printing."""

import argparse
import io
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fairseq_rskip.errors import UsageError, UserError, did_you_mean, discard_output

Item = TypeVar("Item")
LINES_EVERY = 20.0  # seconds between lines of progress, where there is no terminal
LINE = "{desc} {n}/{total}  {rate_fmt}  {remaining} left{postfix}"  # of progress


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that takes no abbreviations and raises ``UsageError`` for a mistake."""

    def __init__(self, **settings: Any):
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings
        )

    @property
    def option_strings(self) -> list[str]:
        """The names of the options, such as ``--beam``, without -h."""
        names = []
        for action in self._actions:
            names += [name for name in action.option_strings if action.dest != "help"]
        return names

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        try:
            options, unknown = self.parse_known_args(words, namespace)
        except UsageError as error:
            misspelled = self.unknown_options(words)  # perhaps what is missing
            if "required" in str(error) and misspelled:
                self.refuse(misspelled, self.option_strings)
            raise
        if unknown:
            self.refuse(unknown, self.option_strings)
        return options

    def unknown_options(self, words: Sequence[str]) -> list[str]:
        """Those of ``words`` that begin with -- and name none of the options.

        None of a command with further commands, which have options of their own.
        """
        if self._subparsers is not None:
            return []
        unknown = []
        for word in words:
            name = word.partition("=")[0]
            is_option = name.startswith("--") and name != "--"
            if is_option and name not in self._option_string_actions:
                unknown.append(word)
        return unknown

    def refuse(self, unknown: Sequence[str], known: Sequence[str]) -> NoReturn:
        """Raise ``UsageError`` for the first of the ``unknown`` words that is an option, with the
        nearest of ``known``.
        """
        word = next((word for word in unknown if word.startswith("--")), unknown[0])
        name = word.partition("=")[0]
        hint = did_you_mean(name, known)
        self.error(f"unrecognized argument {name}" + (f"; {hint}" if hint else ""))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """argparse's check that ``value`` is one of the ``choices``, with the nearest of them."""
        if action.choices is None or value in action.choices:
            return
        choices = list(map(str, action.choices))
        expected = f"expected {', '.join(choices)}"
        hint = did_you_mean(str(value), choices, expected)
        raise argparse.ArgumentError(action, f"invalid choice: {str(value)!r}; {hint}")

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def to_argv(options: Mapping[str, Any]) -> list[str]:
    """``options``, named without dashes, as words of a command line.

    One that is true has no value; a false one is left out. Raises ``UserError`` for an option that
    shows a help text.
    """
    words = []
    for name, value in options.items():
        if name in ("h", "help", "help-skips"):
            raise UserError(
                f"option {name!r} shows a help text: expected options that change a run"
            )
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words += [f"--{name}", str(value)]
    return words


def label_and_path(text: str) -> tuple[str, str]:
    """Label and path of ``LABEL=PATH``.

    The label of a path alone is its last name. A text that is the path of a file or folder is a
    path alone, even if "=" is in it.
    """
    label, _, path = text.partition("=")
    if not (label and path) or Path(text).exists():
        return Path(text).resolve().name, text
    return label, path


def whole_number(least: int) -> Callable[[str], int]:
    """A type for argparse: integers from ``least`` on."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return value

    return convert


def finite(text: str) -> float:
    """A type for argparse: any number but infinity and NaN."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def between(least: float, below: float, open_below: bool = False) -> Callable[[str], float]:
    """A type for argparse: numbers from ``least`` on that are less than ``below``.

    With ``open_below`` they are above ``least``.
    """

    def convert(text: str) -> float:
        value = finite(text)
        inside = least < value < below or (value == least and not open_below)
        if not inside:
            start = "above" if open_below else "of at least"
            end = f" and below {below:g}" if below < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {start} {least:g}{end}")
        return value

    return convert


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line of text for each of ``rows``, in left-aligned columns; rows have equal lengths."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  ".join(cells).rstrip())
    return lines


def print_line(line: str, stream: str = "stdout", bar: Any | None = None) -> None:
    """Print ``line`` to ``stdout`` or ``stderr``, above tqdm's ``bar`` if there is one.

    A closed pipe is no error, so that ``train_cifar.py | head`` does not end the training.
    """
    file = getattr(sys, stream)
    try:
        if bar is None:
            print(line, file=file, flush=True)
        else:
            bar.write(line, file=file)
            file.flush()
    except BrokenPipeError:
        discard_output(file)


class Progress:
    """The number done of ``total``, the speed and the time left.

    A bar on a terminal, else a line in ``stream`` every ``LINES_EVERY`` seconds. The first prepares
    much, so its time does not count.
    """

    def __init__(
        self, total: int, label: str, unit: str = "it", done: int = 0, stream: str = "stderr"
    ):
        from tqdm import tqdm

        self.terminal = sys.stderr.isatty()
        self.stream = stream
        self.done = done  # before this process
        if self.terminal:
            look = {"dynamic_ncols": True, "mininterval": 1.0}
        else:
            look = {"file": io.StringIO(), "bar_format": LINE, "mininterval": LINES_EVERY}
        self.bar = tqdm(
            desc=label,
            total=total,
            unit=unit,
            initial=done,
            leave=False,
            miniters=1,
            smoothing=0,
            **look,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_error: object) -> None:
        self.bar.close()

    def advance(self, figures: Callable[[], dict[str, str]] = dict) -> None:
        """Advance by one; ``figures`` is called only if something is shown."""
        is_first = self.bar.n == self.done
        is_shown = self.bar.update()
        if is_first:
            self.bar.initial = self.bar.n
            self.bar.start_t += self.bar.format_dict["elapsed"]
        if is_shown:
            self.show(figures())

    def show(self, figures: Mapping[str, str]) -> None:
        """Show the state now, and ``figures``, name -> value, after it."""
        self.bar.set_postfix(figures)
        if not self.terminal:
            print_line(str(self.bar), self.stream)

    def print(self, line: str) -> None:
        """Print ``line`` to stdout, above the bar if there is one."""
        print_line(line, bar=self.bar if self.terminal else None)


def progress(items: Iterable[Item], total: int, label: str, unit: str = "batch") -> Iterator[Item]:
    """``items``, of which there are ``total``, with a ``Progress``."""
    with Progress(total, label, unit) as shown:
        for item in items:
            yield item
            shown.advance()


def number_or_auto(value: Any) -> float | str:
    """A type for argparse: a number, or "auto"."""
    try:
        return "auto" if value == "auto" else float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value}: expected a number, or auto") from None
