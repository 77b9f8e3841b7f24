"""The recursive skip and its norms as one operator, and the choice of what computes it.

Two kernels implement :mod:`.operator`: ``cpu`` is C++ built on this machine, ``cuda`` is Triton,
which torch brings, for up to four steps and no mixtures. The environment variable ``RSKIP_OPS``
chooses among ``CHOICES``. ``auto`` is the C++ on a CPU and torch's operators on CUDA, where a
training waits for the host and a launch from Python costs more than it saves (docs/ops.md).
"""

import importlib
import logging
import os
from typing import NamedTuple

import torch
from torch import Tensor, autograd

from ..errors import UserError
from .compiling import constant_while_compiling
from .operator import operator

CHOICES = ("auto", "torch", "cpu", "cuda")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# on CUDA, by the number of steps: registers hold no more
_MOST_FEATURES = {1: 8192, 2: 4096, 3: 2048, 4: 2048}
_PLAIN = (Tensor, torch.nn.Parameter)
logger = logging.getLogger(__name__)


class Backend(NamedTuple):
    """The implementation of the operator on one kind of device.

    ``name`` is cpu, cuda or torch; ``reason`` says why.
    """

    name: str
    reason: str


def in_use(device: str = "cpu", build: bool = False) -> Backend:
    """The implementation for tensors on ``device``; the first answer is that of the whole process.

    ``build`` compiles a CPU operator that is not in the cache. Without it torch's operators compute
    in its place, and one line says how to build. Raises ``UserError`` for an unknown ``RSKIP_OPS``.
    """
    if device not in _backends:
        _backends[device] = _choose(device, build)
    return _backends[device]


def should_fuse(
    x: Tensor,
    f_x: Tensor,
    dim: int,
    steps: int,
    skip_scale: float = 1.0,
    branch_scale: float = 1.0,
    mixed: bool = False,
) -> bool:
    """Whether :func:`skip_norm` can and should compute these inputs, as rows of ``dim`` features.

    With ``mixed`` it is their mixture, :func:`skip_mix`.

    ``RSKIP_OPS=auto`` leaves ``norm(x + F)``, stock fairseq's skip, to torch: the result equals
    stock's bit for bit.
    """
    if steps == 1 and skip_scale == 1.0 and branch_scale == 1.0 and _choice() == "auto":
        return False
    device = x.device.type
    if device not in CHOICES or f_x.device != x.device:
        return False
    if x.dtype not in _DTYPES or f_x.dtype not in _DTYPES or x.shape != f_x.shape:
        return False

    if torch.compiler.is_compiling():
        is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.7
        if is_exporting():
            return False
    elif type(x) not in _PLAIN or type(f_x) not in _PLAIN or is_transformed():
        return False

    if device == "cuda":
        fits = not mixed and dim <= _MOST_FEATURES.get(steps, 0)
    else:
        fits = dim > 0 and dim % 16 == 0
    return fits and _has_kernel(device)


def skip_norm(
    x: Tensor, f_x: Tensor, gains, biases, skip_scale=1.0, branch_scale=1.0, eps=1e-5, rms=False
) -> Tensor:
    """The recursive skip as one operator.

    ``y_1 = norm_1(skip_scale * x + branch_scale * F)``, ``y_k = norm_k(skip_scale * x + y_{k-1})``:
    Eq. 3 of Liu et al. 2020 with one gain and ``skip_scale`` λ, Eq. 4 with λ gains and
    ``skip_scale`` 1.

    Args:
        x, f_x: of one shape ``(..., dim)``, accepted by :func:`should_fuse`, which is not asked
            again: a kernel computes in fp32 whatever their types.
        gains: each step's gain of shape ``(dim,)``, one or more.
        biases: as many biases, or none.
        skip_scale, branch_scale: numbers.
        eps: added to the variance, or to the mean square with ``rms``.
        rms: RMS normalisation in place of layer normalisation.

    Returns ``x``'s dtype, with moments taken in fp32. Backward keeps ``x``, ``f_x`` and two numbers
    for each row and step, and recomputes the rest. Raises ``ValueError`` where no kernel is loaded
    for the device.
    """
    options = (skip_scale, branch_scale, eps, rms)
    return operator(x, f_x, gains, biases, None, None, *options)[0]


def skip_mix(
    x,
    f_x,
    gains,
    biases,
    weights,
    direction=None,
    skip_scale=1.0,
    branch_scale=1.0,
    eps=1e-5,
    rms=False,
) -> tuple[Tensor, Tensor]:
    """``y = sum_k p_k y_k`` with the y_k of :func:`skip_norm`, and p.

    No y_k is written to memory.

    Args:
        weights: p, of shape ``(K,)`` for K gains; with a ``direction``, the b of the first K - 1
            steps.
        direction: u of shape ``(dim,)``, with which each row halts by itself:
            ``h_k = sigmoid(u . y_k + b_k)``, ``p_k = h_k prod_{j<k} (1 - h_j)``, p_K the rest.

    The other arguments are :func:`skip_norm`'s. Returns y, of ``x``'s shape and dtype, and p: the
    weights, or with a direction ``(K, ...)``, a number for each step and row, at least fp32. Both
    have their gradients.
    """
    options = (skip_scale, branch_scale, eps, rms)
    y, p = operator(x, f_x, gains, biases, weights, direction, *options)
    return y, weights if direction is None else p


def is_transformed() -> bool:
    """Whether torch.func (vmap, grad, ...), forward-mode differentiation or torch.jit.trace, which
    the older ONNX exporter uses, is active.
    """
    if torch.jit.is_tracing():
        return True
    functional = torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore
    return functional or autograd.forward_ad._current_level >= 0


@constant_while_compiling
def _has_kernel(device: str) -> bool:
    """Whether the operator computes on ``device``."""
    return in_use(device).name != "torch"


@constant_while_compiling
def _choice() -> str:
    return os.environ.get("RSKIP_OPS") or "auto"


def _choose(device: str, build: bool) -> Backend:
    choice = _choice()
    if choice not in CHOICES:
        raise UserError(f"RSKIP_OPS={choice!r}: expected one of {', '.join(CHOICES)}")
    if choice == "auto" and device == "cuda":
        return Backend("torch", "RSKIP_OPS=auto; RSKIP_OPS=cuda chooses Triton's kernels")
    if choice not in ("auto", device):
        return Backend("torch", f"RSKIP_OPS={choice}")
    try:
        module = importlib.import_module(f".{device}", __package__)
        return Backend(device, module.load(build))
    except Exception as error:  # whatever keeps a kernel from this machine, torch computes the same
        reason = str(error).strip().split("\n")[0][:300]
        logger.warning(f"skip connections run without their {device} operator: {reason}")
        return Backend("torch", reason)


_backends: dict[str, Backend] = {}
