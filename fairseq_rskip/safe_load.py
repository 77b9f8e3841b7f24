"""The safe way to read a fairseq checkpoint: an allow-list, and literals in place of ``eval``.

The allow-list of what a checkpoint may hold stands here and nowhere else (:func:`allowed_globals`).
The wheel that ``tools/build_fairseq.py`` builds holds a copy of this file, ``fairseq.safe_load``,
and of ``errors.py``.
"""

import argparse
import ast
import os
import pickle
import re
import zipfile

import torch

from .errors import UserError


class CheckpointError(UserError):
    """A checkpoint cannot be read: missing, truncated or not a checkpoint at all."""


class UnsafeCheckpointError(CheckpointError):
    """A checkpoint holds something that is not on the allow-list. Nothing in it was run."""


class _Refused(Exception):
    """Something that is not on the allow-list; ``str()`` of it names it. (Torch rewords pickle's
    own exceptions.)
    """


class _NumberType:
    """Stands in for ``numpy.dtype`` while a checkpoint is read: takes plain number types, by their
    short name.

    numpy's own trusts the state it is given; forged flags make it take bytes for pointers to
    objects.
    """

    def __init__(self, code, *_align_and_copy):
        if not (isinstance(code, str) and re.match(r"[biufc]\d{1,2}$", code)):
            raise _Refused(f"numpy.dtype of {code!r}")
        self.name = code

    def __setstate__(self, state):
        if state[1] not in ("<", ">", "|", "="):
            raise _Refused(f"numpy.dtype of byte order {state[1]!r}")
        self.name = state[1] + self.name

    def read(self, data):
        import numpy

        return numpy.frombuffer(data, dtype=numpy.dtype(self.name)).copy()


class _NumberArray:
    """Stands in for ``numpy.ndarray`` and the function that makes an empty one; ``value`` is the
    finished array.
    """

    def __init__(self, *_class_shape_and_code):
        self.value = None

    def __setstate__(self, state):
        _version, shape, kind, fortran, data = state
        if not isinstance(kind, _NumberType):
            raise _Refused("numpy.ndarray without a number type")
        self.value = kind.read(data).reshape(shape, order="F" if fortran else "C")


def _number_scalar(kind, data):
    """Stands in for numpy's function that makes a scalar."""
    if not isinstance(kind, _NumberType):
        raise _Refused("a numpy scalar without a number type")
    return kind.read(data)[0]


def allowed_globals():
    """Name in the pickle -> what it stands for, for everything beside what torch's weights_only
    allows by itself.

    torch allows tensors, their storages and dtypes, OrderedDict, set, bytes and numbers. fairseq
    0.12.2 adds:

    * ``argparse.Namespace``, the settings of models and tasks that have no dataclass, and all
      settings in checkpoints before 0.10. It is a bag of attributes: building one sets attributes
      on it and calls nothing.
    * numpy arrays and scalars of numbers, in the validation metrics (``--eval-bleu`` logs such
      arrays). The names are numpy 1's and numpy 2's; they lead to the stand-ins above, which read
      numbers from bytes and do nothing else.
    """
    allowed = {
        "argparse.Namespace": argparse.Namespace,
        "numpy.dtype": _NumberType,
        "numpy.ndarray": _NumberArray,
    }
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        allowed[module + "._reconstruct"] = _NumberArray
        allowed[module + ".scalar"] = _number_scalar
    return allowed


def load_checkpoint(file, map_location=None, **_ignored):
    """``torch.load`` for checkpoints: only tensors, plain containers, and what ``allowed_globals``
    lists.

    ``file`` is a path or a binary file. Raises ``UnsafeCheckpointError`` naming the offending
    global, before anything the file asks for is called, and ``CheckpointError`` when the file
    cannot be read. Further options of ``torch.load`` are accepted and ignored, so that no caller
    can turn the check off.
    """
    if isinstance(file, (str, os.PathLike)):
        try:
            with open(file, "rb") as opened:
                return load_checkpoint(opened, map_location)
        except FileNotFoundError:
            raise CheckpointError(f"checkpoint {file} does not exist") from None
        except OSError as error:
            raise CheckpointError(
                f"cannot read checkpoint {file}: {error.strerror or error}"
            ) from None
    try:
        _inspect_zip(file)
        allowed = [(item, name) for name, item in allowed_globals().items()]
        with torch.serialization.safe_globals(allowed):
            return _finished(torch.load(file, map_location=map_location, weights_only=True))
    except Exception as error:
        raise _explain(getattr(file, "name", "(no file name)"), error) from None


def _finished(value):
    """``value`` with every ``_NumberArray`` in it replaced by its array; containers keep their
    identity.
    """
    if isinstance(value, _NumberArray):
        return value.value
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _finished(item)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            value[number] = _finished(item)
    elif isinstance(value, argparse.Namespace):
        _finished(vars(value))
    elif type(value) is tuple:
        return tuple(_finished(item) for item in value)
    return value


def _inspect_zip(file):
    """Raise for TorchScript, and for bytes that are not those once written: torch does not look at
    the check sums.
    """
    start = file.tell()
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if member.filename.endswith("/constants.pkl"):
                    raise _Refused("TorchScript code")
                if member.CRC:  # torch writes 0 where it was told to compute none
                    _read_through(archive, member)
    file.seek(start)


def _read_through(archive, member):
    """Read a member to its end, where zipfile compares its check sum."""
    with archive.open(member) as content:
        while content.read(1 << 20):
            pass


def _explain(name, error):
    """The one-line error for whatever loading the file ``name`` raised."""
    first = str(error).strip().split("\n")[0]
    match = re.search(r"GLOBAL (\S+)", str(error)) or re.search(
        r"(?:function|but got) (<.+?>)", str(error)
    )
    if isinstance(error, _Refused) or (isinstance(error, pickle.UnpicklingError) and match):
        what = str(error) if isinstance(error, _Refused) else match.group(1)
        return UnsafeCheckpointError(
            f"refused checkpoint {name}: it asks for {what}, which is not among the harmless types"
            " of a fairseq checkpoint; nothing in it was run. "
            "Use a checkpoint from a source you trust."
        )
    if isinstance(error, zipfile.BadZipFile):
        return CheckpointError(f"cannot read checkpoint {name}: damaged ({first[:150]})")
    detail = f" ({type(error).__name__}: {first[:150]})"
    no_help = isinstance(error, (pickle.UnpicklingError, LookupError, EOFError))
    if no_help or "PytorchStreamReader" in first:
        detail = ""  # the words of pickle and of torch's reader say nothing to a user
    return CheckpointError(f"cannot read checkpoint {name}: truncated, or not a checkpoint{detail}")


_ARITHMETIC = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
}
_CONTAINERS = {ast.Tuple: tuple, ast.List: list, ast.Set: set}
_LONGEST = 100000


def literal(text):
    """The value of a setting such as ``"(0.9, 0.98)"`` or ``"[(512, 3)] * 20"``, in place of
    fairseq's ``eval``.

    Settings stand in checkpoints, so evaluating them must not call anything: constants, tuples,
    lists, sets, dicts and + - * are understood. Raises ``UserError`` for anything else,
    ``TypeError`` (as ``eval``) if ``text`` is no string.
    """
    if not isinstance(text, str):
        raise TypeError(f"a setting must be a string, got {type(text).__name__}")
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, KeyError, RecursionError, MemoryError):
        raise UserError(
            f"cannot read the setting {text!r}: only numbers, strings, lists, + and * work"
        ) from None


def _evaluate(node):
    """The value of a node of the syntax tree. Raises ``ValueError`` and others of a literal."""
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        _check_length(node.op, left, right)
        return _ARITHMETIC[type(node.op)](left, right)
    if type(node) in _CONTAINERS:
        kind = _CONTAINERS[type(node)]
        return kind(_evaluate(item) for item in node.elts)
    if isinstance(node, ast.Dict):
        return {_evaluate(key): _evaluate(value) for key, value in zip(node.keys, node.values)}
    return ast.literal_eval(node)


def _check_length(operation, left, right):
    """Raise ``ValueError`` for a sum or product of sequences that would be very long."""
    if not hasattr(left, "__len__") and not hasattr(right, "__len__"):
        return
    left_size = len(left) if hasattr(left, "__len__") else abs(left)
    right_size = len(right) if hasattr(right, "__len__") else abs(right)
    length = left_size + right_size if isinstance(operation, ast.Add) else left_size * right_size
    if length > _LONGEST:
        raise ValueError("too long")


def diverged(name: str, value: torch.Tensor) -> bool:
    """Whether a parameter or buffer holds NaN or infinity.

    A position embedding's ``_float_tensor`` may: fairseq never initialises that buffer, and never
    reads its value.
    """
    return not torch.isfinite(value).all() and not str(name).endswith("_float_tensor")
