"""The error of an option whose value is not accepted, in parts.

Python, the command lines and YAML files write an option in three ways. The error keeps its name and
value apart from the words, so that each of them shows it in its own :class:`Spelling`.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .errors import UserError

NONE: Mapping[str, Any] = MappingProxyType({})


class Spelling:
    """How an option is written: here as in Python, ``skip_lambda=5``."""

    after = ":"  # behind the option that is wrong

    def name(self, name: str) -> str:
        return name

    def setting(self, name: str, value: Any) -> str:
        """The option with its value."""
        return f"{name}={value!r}"


class OnCommandLine(Spelling):
    """``--skip-lambda 5``, for names such as ``skip-lambda``; a value of True is left out."""

    def name(self, name: str) -> str:
        return f"--{name}"

    def setting(self, name: str, value: Any) -> str:
        if value is True:
            return self.name(name)
        words = [_plain(each) for each in value] if _is_list(value) else [_plain(value)]
        return f"{self.name(name)} {shlex.join(words)}"


class InYaml(Spelling):
    """``skip-lambda: 5``, for the same names."""

    after = ";"  # a second colon would look like YAML

    def setting(self, name: str, value: Any) -> str:
        if _is_list(value):
            return f"{name}: [{', '.join(map(_plain, value))}]"
        return f"{name}: {_plain(value)}"


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _plain(value: Any) -> str:
    """A value in words: 5.0, which an option that takes "auto" makes of 5, is 5."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


class OptionError(ValueError):
    """An option whose value is not accepted.

    Args:
        name, value: the option.
        expected: what is accepted, in words.
        beside: other options that decide what is accepted, name -> value.
        reason: why, or what to do, in words.
    """

    def __init__(
        self,
        name: str,
        value: Any,
        expected: str,
        beside: Mapping[str, Any] = NONE,
        reason: str = "",
    ):
        super().__init__(name, value, expected, dict(beside), reason)  # what pickle restores
        self.name, self.value, self.expected = name, value, expected
        self.beside, self.reason = dict(beside), reason

    def __str__(self) -> str:
        return self.message(Spelling())

    def message(self, spelling: Spelling) -> str:
        """What was wrong and what is accepted, with all options in ``spelling``."""
        text = f"{spelling.setting(self.name, self.value)}{spelling.after} expected {self.expected}"
        if self.beside:
            settings = [spelling.setting(name, value) for name, value in self.beside.items()]
            text += f" with {', '.join(settings)}"
        return f"{text} ({self.reason})" if self.reason else text

    def renamed(self, rename: Callable[[str], str]) -> "OptionError":
        """The same error about options of other names."""
        beside = {rename(name): value for name, value in self.beside.items()}
        return OptionError(rename(self.name), self.value, self.expected, beside, self.reason)


class UnknownOption(OptionError):
    """An option that the kind of skip connection does not have; it has the ``known`` ones."""

    def __init__(self, name: str, value: Any, kind: str, known: Sequence[str], hint: str = ""):
        super().__init__(name, value, f"an option of kind {kind}")
        self.args = (name, value, kind, known, hint)
        self.kind, self.known, self.hint = kind, known, hint

    def message(self, spelling: Spelling) -> str:
        setting = spelling.setting(self.name, self.value)
        names = ", ".join(spelling.name(name) for name in self.known)
        text = f"{setting}{spelling.after} kind {self.kind} has no such option; it has {names}"
        return f"{text}; {self.hint}" if self.hint else text

    def renamed(self, rename: Callable[[str], str]) -> "UnknownOption":
        known = [rename(name) for name in self.known]
        return UnknownOption(rename(self.name), self.value, self.kind, known, self.hint)


class RefusedOption(UserError):
    """An :class:`OptionError` in the spelling of the command lines, after ``context``.

    ``error`` names the options as command lines do, without the dashes before them: a reader of
    YAML files shows it in their spelling.
    """

    def __init__(self, error: OptionError, context: str = ""):
        super().__init__(error, context)  # what pickle restores
        self.error, self.context = error, context

    def __str__(self) -> str:
        message = self.error.message(OnCommandLine())
        return f"{self.context}: {message}" if self.context else message


def refused(name: str, value: Any, expected: str) -> RefusedOption:
    """The error of an option of a command line, such as ``depth``."""
    return RefusedOption(OptionError(name, value, expected))
