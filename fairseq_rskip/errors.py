"""The one error that a user sees: a line on stderr and an exit status, never a traceback."""

import difflib
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

RESUME = "interrupted; the same command resumes from here"
# Module -> the extra of setup.py that installs it; a test compares. What text and images share is
# in both extras.
EXTRAS = {
    "PIL": "vision",
    "jinja2": "fairseq",
    "matplotlib": "fairseq",
    "num2words": "demo",
    "pandas": "fairseq",
    "pydantic": "fairseq",
    "regex": "fairseq",
    "sacrebleu": "fairseq",
    "sacremoses": "fairseq",
    "safetensors": "fairseq",
    "scipy": "fairseq",
    "sentencepiece": "fairseq",
    "simplejpeg": "vision",
    "sklearn": "vision",
    "statsmodels": "fairseq",
    "submitit": "slurm",
    "subword_nmt": "fairseq",
    "tabulate": "fairseq",
    "tensorboardX": "fairseq",
    "torchvision": "vision",
    "tqdm": "fairseq",
    "wandb": "wandb",
    "yaml": "fairseq",
}
# stock fairseq of the index does not run on today's Python: this builds the one that does, and
# prints its path
FAIRSEQ = '"$(python -m fairseq_rskip.tools.build_fairseq)"'


class UserError(ValueError):
    """A mistake that the user can fix; the message says what was wrong and what is accepted."""

    one_line_for_user = True


class UsageError(UserError):
    """A mistake in the words of a command line, whose options ``-h`` lists."""


def exit_status(main: Callable[[], Any], interrupted: str = "interrupted") -> int:
    """Call ``main()`` and return its exit status (None is 0).

    Errors of the user, of the disk, and a missing package become one line ``error: ...`` on stderr
    and status 1, a mistake in the command line 2, Ctrl-C the line ``interrupted``, if it is not "",
    and 130; a reader that went away (``... | head``) ends the program quietly with 141.
    """
    _print_in_any_locale()
    try:
        status = main() or 0
        sys.stdout.flush()
        return status
    except UsageError as error:
        print(f"error: {error}; -h lists the options", file=sys.stderr)
        return 2
    except UserError as error:
        message = str(error)
    except ModuleNotFoundError as error:
        message = missing_package(error.name or str(error))
    except BrokenPipeError:
        discard_output()
        return 141
    except FileNotFoundError as error:
        message = f"{error.filename} does not exist" if error.filename else str(error)
    except OSError as error:
        message = error.strerror or str(error)
        if error.filename:
            message = f"{error.filename}: {message}"
    except KeyboardInterrupt as stopped:
        if interrupted:
            print(f"error: {interrupted}", file=sys.stderr)
        return getattr(stopped, "status", 130)
    print(f"error: {message}", file=sys.stderr)
    return 1


def _print_in_any_locale() -> None:
    """Have λ and ± printed as escapes where the locale has no such letters."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def missing_package(name: str) -> str:
    """What to do about the module ``name``, which is not installed."""
    package = name.partition(".")[0]
    needs_fairseq = EXTRAS.get(package) == "fairseq" and not importlib.util.find_spec("fairseq")
    if package == "fairseq" or needs_fairseq:
        how = f"in a checkout of fairseq_rskip: pip install {FAIRSEQ} '.[fairseq]'"
    elif package in EXTRAS:
        how = f"in a checkout of fairseq_rskip: pip install '.[{EXTRAS[package]}]'"
    else:
        how = f"pip install {package}"
    return f"this needs the Python package {package}, which is not installed; {how}"


def did_you_mean(word: str, known: Iterable[str], expected: str = "") -> str:
    """``did you mean X?`` for the :func:`nearest` of ``known``, then ``expected``."""
    near = nearest(word, known)
    return f"did you mean {near}? {expected}".rstrip() if near else expected


def nearest(word: str, known: Iterable[str]) -> str:
    """The name among ``known`` that ``word`` may mean; "" if none is near.

    A name that has ``word`` as one of its parts comes first (transformer_rskip_ln for rskip), then
    one of the same parts (en-de for de-en), then one of similar spelling, then one that is a part
    of ``word``.
    """
    names = {name.lower().strip("-"): name for name in known}
    word = word.lower().strip("-")
    longer = [name for name in names if _is_part(word, name)]
    same = [name for name in names if sorted(_parts(name)) == sorted(_parts(word))]
    similar = same or difflib.get_close_matches(word, names, 1, cutoff=0.65)
    shorter = [name for name in names if _is_part(name, word)]
    if longer:
        return names[min(longer, key=len)]
    if similar:
        return names[similar[0]]
    return names[max(shorter, key=len)] if shorter else ""


def _parts(name: str) -> list[str]:
    return name.replace("-", "_").split("_")


def _is_part(part: str, name: str) -> bool:
    """Whether ``name`` is ``part`` between dashes or underscores."""
    part, name = (text.replace("-", "_") for text in (part, name))
    return bool(part) and f"_{part}_" in f"_{name}_"


def discard_output(stream: Any = None) -> None:
    """Send what is still in ``stream``'s buffer (stdout by default) nowhere: after its reader went
    away, flushing it at exit would fail again.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, (stream or sys.stdout).fileno())
    os.close(nowhere)
