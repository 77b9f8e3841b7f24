"""What stock fairseq 0.12.2 needs to live on today's torch and numpy, beside safe loading (``safe_load.py``).

Used in two places. ``scripts/build_fairseq.py`` puts a copy into the wheel it builds, as ``fairseq._today``; there
``fairseq/__init__.py`` calls ``prepare()`` and fairseq's own source, rewritten, calls the rest. Where fairseq came from
elsewhere, the plugin calls ``apply()``, which does what can be done from outside. Both may be called any number of
times.
"""

import atexit
import functools
import os
import queue
import re
import shutil
import sys
import threading
import time
import types
import warnings

import torch

from .safe_load import (  # noqa: F401  (what fairseq's rewritten source and the plugin reach through this module)
    CheckpointError,
    UnsafeCheckpointError,
    UserError,
    allowed_globals,
    literal,
    load_checkpoint,
)

# (start of the message, category): advice to programmers that fairseq's users would see at every command
_WARNINGS = (
    (r"(?s).*hydra\.cc/docs", UserWarning),
    (r"`torch\.jit\.\w+` is deprecated", FutureWarning),
    (r"`torch\.jit\.\w+` is deprecated", DeprecationWarning),
    (r"'pin_memory' argument is set as true but no accelerator", UserWarning),
    (r"`torch\.nn\.utils\.weight_norm` is deprecated", FutureWarning),
    (r"Positional args are being deprecated, use kwargs", FutureWarning),
    (r"Support for mismatched key_padding_mask and attn_mask", UserWarning),
)


def prepare():
    """What does not depend on how fairseq was installed: allow-list, quiet start, one-line errors, a clean end."""
    if hasattr(torch.serialization, "add_safe_globals"):  # torch >= 2.4; for torch.load calls other than ours
        torch.serialization.add_safe_globals([allowed_globals()["argparse.Namespace"]])
    if not sys.warnoptions:
        for message, category in _WARNINGS:
            warnings.filterwarnings("ignore", message=message, category=category)
    _install_excepthook()
    atexit.unregister(_end_batch_loading)
    atexit.register(_end_batch_loading)


def _end_batch_loading(timeout=10.0):
    """Stop the threads in which fairseq loads batches ahead, as after ``--max-update`` in the middle of an epoch.

    They are daemons: an interpreter that ends while one of them computes in C++ aborts ("terminate called without an
    active exception", exit status 134), after a training run that went well.
    """
    iterators = sys.modules.get("fairseq.data.iterators")
    deadline = time.monotonic() + timeout  # in seconds; for a source that never answers
    for thread in threading.enumerate():
        if iterators is None or not isinstance(thread, iterators.BackgroundConsumer):
            continue
        thread._max_len = 0  # ends after the batch at hand
        while thread.is_alive() and time.monotonic() < deadline:
            try:
                while True:
                    thread._queue.get_nowait()  # a full queue keeps the thread waiting
            except queue.Empty:
                thread.join(0.01)


def line_for_user(error):
    """The line of a ``UserError``, also of one that fairseq caught and raised again as something else; else ""."""
    while error is not None:
        if getattr(error, "one_line_for_user", False):
            return str(error)
        error = error.__cause__ or error.__context__
    return ""


def _install_excepthook():
    if getattr(sys.excepthook, "one_line_for_user", False):
        return
    previous = sys.excepthook

    def hook(kind, error, trace):
        line = line_for_user(error)
        if line:
            print(f"error: {line}", file=sys.stderr)
        else:
            previous(kind, error, trace)

    hook.one_line_for_user = True
    sys.excepthook = hook


def exit_on_user_error(function, *arguments):
    """Call ``function``; a ``UserError``, or a setting that omegaconf refuses, ends the program with one line.

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
    """``shutil.copyfile`` that leaves the old file or the new one, never a part: the next run resumes from it."""
    part = f"{destination}.part"
    shutil.copyfile(source, part)
    os.replace(part, destination)
    return destination


def unknown_architecture(name):
    """The error for a model that nothing registered, mostly one of a plugin that was not loaded."""
    return UserError(
        f"no architecture named {name!r} is registered; if it comes from a plugin, load it with --user-dir "
        "(common.user_dir= under hydra; for fairseq_rskip the folder that `python -m fairseq_rskip` prints)"
    )


def hydra_overrides(arguments):
    """``model._name=x model.y=1`` as hydra takes them for a node that has no config group: ``++model._name=x …``.

    fairseq leaves such nodes empty until the plugin has loaded; hydra calls every key of an empty node a mistake.
    fairseq checks the keys when it builds the model.
    """
    named = {argument.partition("._name=")[0] for argument in arguments if re.match(r"\w+\._name=", argument)}
    return [f"++{a}" if re.match(r"\w+\.", a) and a.partition(".")[0] in named else a for a in arguments]


def data_parallel(wrap, module, device_ids=None, output_device=None, **options):
    """``DistributedDataParallel``, which takes device numbers for GPUs only; fairseq gives them on a CPU, too."""
    if next(module.parameters()).device.type == "cpu":
        device_ids = output_device = None
    return wrap(module, device_ids=device_ids, output_device=output_device, **options)


class _Proxy(types.ModuleType):
    """A module with some names replaced; every other name is the module's own."""

    def __init__(self, module, **replaced):
        super().__init__(module.__name__)
        vars(self).update(replaced, _module=module)

    def __getattr__(self, name):
        return getattr(self._module, name)


def apply():
    """Make an installed fairseq of another origin behave like the wheel, once; the wheel needs nothing of it."""
    prepare()
    import fairseq

    if hasattr(fairseq, "_today"):
        return
    import fairseq.checkpoint_utils
    import fairseq.distributed.utils
    import fairseq.file_io
    import fairseq.models.distributed_fairseq_model as distributed
    import fairseq.modules.transformer_layer as layers

    fairseq._today = sys.modules[__name__]
    _restore_numpy_aliases()
    fairseq.checkpoint_utils.torch = _Proxy(torch, load=load_checkpoint)
    # what rank 0 broadcasts to its peers is no file, and holds a placeholder class of fairseq's own
    fairseq.distributed.utils.torch = _Proxy(torch, load=functools.partial(torch.load, weights_only=False))
    for name, module in list(sys.modules.items()):
        if name.startswith("fairseq.") and module is not None:
            module.eval = literal
    distributed.DistributedDataParallel = functools.partial(data_parallel, distributed.DistributedDataParallel)
    fairseq.file_io.shutil = _Proxy(shutil, copyfile=copy_whole)
    _switch_fused_encoder_off(getattr(layers, "TransformerEncoderLayerBase", layers.TransformerEncoderLayer))


def _restore_numpy_aliases():
    import numpy

    for name, kind in (("float", float), ("int", int), ("bool", bool), ("object", object), ("long", int)):
        if name not in vars(numpy):
            setattr(numpy, name, kind)
    if not hasattr(numpy, "compat"):
        numpy.compat = types.SimpleNamespace(long=int)


def _switch_fused_encoder_off(layer):
    """The fused path needs ``can_use_fastpath`` in layer and encoder; every layer says no after its construction."""
    construct = layer.__init__

    @functools.wraps(construct)
    def without_fused_path(self, *args, **kwargs):
        construct(self, *args, **kwargs)
        self.can_use_fastpath = False

    layer.__init__ = without_fused_path
