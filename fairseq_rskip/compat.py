"""What the patched fairseq calls, beside safe loading (``safe_load.py``).

The wheel that ``tools/build_fairseq.py`` builds holds a copy, ``fairseq._today``:
``fairseq/__init__.py`` calls ``prepare()``, other modules call the rest (``patches/`` says where).
With any other fairseq the plugin calls ``prepare()``; fairseq stays as it is otherwise.
"""

import argparse
import atexit
import contextlib
import errno
import multiprocessing
import os
import queue
import re
import shutil
import sys
import threading
import time
import warnings

import torch

from .safe_load import (  # noqa: F401  (the patched fairseq reaches them here)
    CheckpointError,
    UnsafeCheckpointError,
    UserError,
    literal,
    load_checkpoint,
)

# (start of the message, category): advice to programmers that fairseq's users would see at every
# command
_WARNINGS = (
    (r"(?s).*hydra\.cc/docs", UserWarning),
    (r"`torch\.jit\.\w+` is (deprecated|not supported)", FutureWarning),
    (r"`torch\.jit\.\w+` is (deprecated|not supported)", DeprecationWarning),
    (r"'pin_memory' argument is set as true but no accelerator", UserWarning),
    (r"`torch\.nn\.utils\.weight_norm` is deprecated", FutureWarning),
    (r"Positional args are being deprecated, use kwargs", FutureWarning),
    (r"Support for mismatched key_padding_mask and attn_mask", UserWarning),
)
LONGEST_WAIT = 10.0  # seconds, for a source of batches that never answers


def prepare():
    """Set up what any fairseq needs: allow-list, fewer warnings, forked workers, one-line errors, a
    clean end.
    """
    # for calls of torch.load other than ours
    torch.serialization.add_safe_globals([argparse.Namespace])
    if not sys.warnoptions:
        for message, category in _WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category)
    # Linux's default up to Python 3.13, which fairseq relies on: other workers import everything
    # again at every epoch
    if (
        sys.version_info >= (3, 14)
        and sys.platform == "linux"
        and not multiprocessing.get_start_method(allow_none=True)
    ):
        multiprocessing.set_start_method("fork")
    _accept_hydras_help()
    _install_excepthook()
    atexit.register(_end_batch_loading)


def _accept_hydras_help():
    """Let hydra-core 1.3 start on Python 3.14, which refuses a help text that is not a string."""
    if sys.version_info >= (3, 14):
        argparse.ArgumentParser._check_help = lambda parser, action: None


def _end_batch_loading():
    """Stop the threads in which fairseq loads batches ahead, as after ``--max-update`` in the
    middle of an epoch.

    They are daemons: an interpreter that ends while one of them computes in C++ aborts ("terminate
    called without an active exception", exit status 134), after a training run that went well.
    """
    iterators = sys.modules.get("fairseq.data.iterators")
    if iterators is None:
        return
    deadline = time.monotonic() + LONGEST_WAIT
    for thread in threading.enumerate():
        if isinstance(thread, iterators.BackgroundConsumer):
            _end_thread(thread, deadline)


def _end_thread(thread, deadline):
    """Wait until a ``BackgroundConsumer`` has ended, or until ``deadline``."""
    thread._max_len = 0  # it ends after the batch at hand
    while thread.is_alive() and time.monotonic() < deadline:
        try:
            while True:
                thread._queue.get_nowait()  # a full queue keeps the thread waiting
        except queue.Empty:
            thread.join(0.01)


def line_for_user(error):
    """The line of a ``UserError`` or a full disk, also of one that was raised again as something
    else; else "".
    """
    while error is not None:
        if getattr(error, "one_line_for_user", False):
            return str(error)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        error = error.__cause__ or error.__context__
    return ""


def _install_excepthook():
    """Have an error of the user end any program with one line.

    The entry points of fairseq's commands call fairseq directly: no code of this package surrounds
    them that could catch the exception.
    """
    previous = sys.excepthook

    def hook(kind, error, trace):
        line = line_for_user(error)
        if line:
            print(f"error: {line}", file=sys.stderr)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook


def exit_on_user_error(function, *arguments):
    """Call ``function``; a ``UserError``, or a setting that omegaconf refuses, ends the program
    with one line.

    hydra would print a traceback instead, or several lines.
    """
    try:
        return function(*arguments)
    except Exception as error:
        line = line_for_user(error)
        if not line and type(error).__module__.startswith("omegaconf"):
            line = " ".join(str(error).split())
        if not line:
            raise
        sys.exit(f"error: {line}")


def copy_whole(source, destination):
    """``shutil.copyfile`` that leaves the old file or the new one, never a part: the next run
    resumes from it.
    """
    part = f"{destination}.part"
    try:
        shutil.copyfile(source, part)
        os.replace(part, destination)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise
    return destination


def unknown_architecture(name):
    """The error for a model that nothing registered, mostly one of a plugin that was not loaded."""
    reason = f"no architecture named {name!r} is registered"
    if "fairseq_rskip.models" in sys.modules:  # the plugin is loaded
        from fairseq_rskip.residual import own_rules

        return UserError(f"{reason}{own_rules.hint()}")
    return UserError(
        f"{reason}; if it comes from a plugin, load it with --user-dir (common.user_dir= under "
        "hydra; for fairseq_rskip the folder that `python -m fairseq_rskip` prints); a rule of "
        "your own also needs RSKIP_RULES=FILE"
    )


def hydra_overrides(arguments):
    """``model._name=x model.y=1`` as hydra takes them for a node that has no config group:
    ``++model._name=x …``.

    fairseq leaves such nodes empty until the plugin has loaded; hydra calls every key of an empty
    node a mistake. fairseq checks the keys when it builds the model.
    """
    named = set()
    for argument in arguments:
        if re.match(r"\w+\._name=", argument):
            named.add(argument.partition(".")[0])
    overrides = []
    for argument in arguments:
        node, dot, _ = argument.partition(".")
        if dot and node in named:
            argument = f"++{argument}"
        overrides.append(argument)
    return overrides
