"""Rules in files of your own: ``RSKIP_RULES=my_rule.py rskip train ... transformer_my_rule_tiny``.

Every command and ``import fairseq_rskip.residual`` run the files that the environment variable
names (several: joined by ``:``), whose classes register themselves; processes that a command starts
inherit it.
"""

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import UserError
from .registry import KINDS

VARIABLE = "RSKIP_RULES"
_checksums: dict[str, str] = {}  # module -> SHA-256 of its file when it was run


def hint() -> str:
    """What an error for an unknown architecture or kind adds."""
    paths = paths_of_files()
    if not paths:
        return f"; a rule of your own needs {VARIABLE}=FILE"
    late = [path for path in paths if path.stem not in _checksums and not _is_main(path)]
    if late:
        return f"; {VARIABLE} was set after fairseq_rskip was imported: set it before"
    loaded = os.pathsep.join(map(str, paths))
    return f"; rules of your own are those of {VARIABLE}={loaded}"


def paths_of_files() -> list[Path]:
    """The files that ``RSKIP_RULES`` names."""
    names = os.environ.get(VARIABLE, "").split(os.pathsep)
    return [Path(name).expanduser().absolute() for name in names if name.strip()]


def load() -> None:
    """Run the files that ``RSKIP_RULES`` names. Raises ``UserError`` that says what is wrong."""
    paths = paths_of_files()
    for path in paths:
        _run(path)
    if paths:  # a process that is started elsewhere finds them, too
        os.environ[VARIABLE] = os.pathsep.join(map(str, paths))


def _run(path: Path) -> None:
    """Import ``path`` as the module of its name, as ``import my_rule`` beside it would."""
    if path.suffix != ".py" or not path.is_file():
        what = "is no file of Python" if path.exists() else "does not exist"
        raise UserError(f"{VARIABLE}: {path} {what}")
    if not path.stem.isidentifier():
        raise UserError(f"{VARIABLE}: {path}: expected a name that can be imported, my_rule.py")
    if _is_main(path):
        return  # it will register its rule
    is_imported = path.stem in sys.modules
    if is_imported and path.stem in _checksums and _is_file(sys.modules[path.stem], path):
        return  # by an earlier call
    _check_no_other_module(path)
    _checksums[path.stem] = _sha256(path)
    if not is_imported:
        _execute(path)


def _check_no_other_module(path: Path) -> None:
    """Raise ``UserError`` if ``import`` of the file's name would give another module."""
    name = path.stem
    if name in sys.modules:
        origin = getattr(sys.modules[name], "__file__", None)
    else:
        spec = importlib.util.find_spec(name)
        if spec is None:
            return
        origin = spec.origin
    if not _is_same(origin, path):
        file = f", {origin}" if origin else ""
        raise UserError(
            f"{VARIABLE}: {path}: there is another module {name}{file}; rename the file"
        )


def _execute(path: Path) -> None:
    """Run the file as a module, which registers a rule. Raises ``UserError`` where it does not."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # of a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    known = set(KINDS)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[path.stem], _checksums[path.stem]
        raise UserError(
            f"{VARIABLE}: {path}, line {_line(error, path)}: {type(error).__name__}: {error}"
        ) from error
    if known == set(KINDS):
        raise UserError(f'{VARIABLE}: {path} registers no rule: expected @register("name")')


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_unchanged(checksum: str) -> bool:
    """Whether one of the files, as it is now, has this SHA-256."""
    return any(path.is_file() and _sha256(path) == checksum for path in paths_of_files())


def changed_files(saved: dict[str, str]) -> list[str]:
    """The files of your own that have changed since a model was saved.

    ``saved`` is what ``state.rule_files`` returned of it.
    """
    changed = []
    for kind, before in saved.items():
        if checksum(kind) not in ("", before):
            changed.append(str(file_of(kind)))
    return changed


def _is_main(path: Path) -> bool:
    """Whether ``path`` is the program itself."""
    return _is_file(sys.modules["__main__"], path)


def _is_file(module: Any, path: Path) -> bool:
    """Whether ``module`` was made from the file ``path``."""
    return _is_same(getattr(module, "__file__", None), path)


def _is_same(file: str | None, path: Path) -> bool:
    """Whether ``file``, a path, None or a word such as "built-in", is ``path`` or a copy of it."""
    if file is None or not os.path.isfile(file):
        return False
    return path.samefile(file) or _sha256(Path(file)) == _sha256(path)


def checksums_of(kinds: Iterable[str]) -> dict[str, str]:
    """File name -> :func:`checksum`, of the files that have those of ``kinds`` of your own."""
    files = {}
    for kind in kinds:
        path = file_of(kind)
        if path is not None:
            files[path.name] = checksum(kind)
    return files


def check_loaded(folder: Path, expected: dict[str, str]) -> None:
    """Raise ``UserError`` unless the files of rules in ``folder`` are loaded as they are there.

    ``expected`` is what :func:`checksums_of` returned for the model in it.
    """
    wrong = [name for name, sha256 in expected.items() if sha256 not in _checksums.values()]
    if wrong:
        files = os.pathsep.join(str(folder / name) for name in expected)
        loaded = ", ".join(map(str, paths_of_files())) or "no file is loaded"
        raise UserError(
            f"the model in {folder} has a rule of its own, in {', '.join(wrong)}: expected "
            f"{VARIABLE}={files} ({loaded}); read the file before you run it"
        )


def where(error: BaseException, path: Path) -> str:
    """The file, and its last line that led to ``error``, after the name of the variable."""
    line = _line(error, path)
    return f"{VARIABLE}: {path}, line {line}" if line else f"{VARIABLE}: {path}"


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
    """The SHA-256 of the file that has a kind of your own, as it was when it was run.

    "" for any other kind. Modules that the file imports are not part of it.
    """
    rule = KINDS.get(kind)
    return _checksums.get(rule.__module__, "") if rule else ""
