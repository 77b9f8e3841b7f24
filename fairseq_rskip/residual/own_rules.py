"""Rules in files of your own: ``RSKIP_RULES=my_rule.py rskip train ... transformer_my_rule_tiny``.

Every command and ``import fairseq_rskip.residual`` run the files that the environment variable
names (several: joined by ``:``), whose classes register themselves; processes that a command starts
inherit it.
"""

import hashlib
import importlib.util
import os
import sys
from pathlib import Path

from ..errors import UserError
from .registry import KINDS

VARIABLE = "RSKIP_RULES"


def load() -> None:
    """Run the files that ``RSKIP_RULES`` names. Raises ``UserError`` that says what is wrong."""
    names = os.environ.get(VARIABLE, "").split(os.pathsep)
    paths = [Path(name).expanduser().absolute() for name in names if name.strip()]
    for path in paths:
        _run(path)
    if paths:  # a process that is started elsewhere finds them, too
        os.environ[VARIABLE] = os.pathsep.join(map(str, paths))


def _run(path: Path) -> None:
    """Import ``path`` as the module of its name, as ``import my_rule`` beside it would."""
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"{VARIABLE}: {path} is no file of Python")
    loaded = sys.modules.get(path.stem)
    found = loaded.__spec__ if loaded else importlib.util.find_spec(path.stem)
    if found is not None and found.origin != str(path):
        raise UserError(f"{VARIABLE}: {path}: there is a module {path.stem}; rename the file")
    if loaded:
        return

    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # of a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[path.stem]
        raise UserError(
            f"{VARIABLE}: {path}, line {_line(error, path)}: {type(error).__name__}: {error}"
        ) from error


def _line(error: BaseException, path: Path) -> int | None:
    """The last line of ``path`` that led to ``error``."""
    if isinstance(error, SyntaxError):
        return error.lineno
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def file_of(kind: str) -> Path | None:
    """The file of your own that has the class of ``kind``; None for a rule of this package."""
    module = KINDS[kind].__module__
    if module.startswith(f"{__package__}."):
        return None
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if file else None


def own_kinds() -> list[str]:
    """The kinds that are not of this package."""
    return [kind for kind in KINDS if file_of(kind) is not None]


def checksum(kind: str) -> str:
    """The SHA-256 of the file that has a kind of your own; "" for a rule of this package."""
    path = file_of(kind)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
