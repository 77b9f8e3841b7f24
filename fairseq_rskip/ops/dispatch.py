"""One operator for the recursive skip and its norms, and the choice of what computes it.

``torch.ops.fairseq_rskip.skip_norm`` is registered here: its schema, its shapes for ``torch.compile``, its reference.
The kernels register themselves when first used: ``cpu`` is C++ that is built on this machine, ``cuda`` is Triton, which
torch brings. The environment variable ``RSKIP_OPS`` chooses among ``CHOICES``.
"""

import os
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UserError
from . import reference

CHOICES = ("auto", "reference", "cpu", "cuda")
VARIABLE = "RSKIP_OPS"
_ARGUMENTS = (
    "Tensor x, Tensor f_x, Tensor[] gains, Tensor[] biases, float skip_scale, float branch_scale, float eps, bool rms"
)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PLAIN = (Tensor, torch.nn.Parameter)


class Backend(NamedTuple):
    """What computes the operator on one kind of device: ``name`` is cpu, cuda or reference, ``reason`` says why."""

    name: str
    reason: str

    def takes(self, features: int, steps: int, mixed: bool) -> bool:
        """Whether its kernel computes rows of so many features and steps, or a mixture of so many."""
        return self.name != "reference" and (self.name not in _limits or _limits[self.name](features, steps, mixed))


def in_use(device: str = "cpu") -> Backend:
    """What computes the operator for tensors on ``device``; builds and loads it where this was not done yet.

    Raises ``UserError`` for a value of ``RSKIP_OPS`` that is not one of ``CHOICES``.
    """
    if device not in _backends:
        _backends[device] = _choose(device)
    return _backends[device]


def takes(x: Tensor, f_x: Tensor, steps: int, skip_scale: float = 1.0, branch_scale: float = 1.0) -> bool:
    """Whether :func:`skip_norm` runs one kernel for these inputs, and is asked to.

    ``RSKIP_OPS=auto`` leaves ``norm(x + F)``, the skip of stock fairseq, to torch: equal to stock bit for bit.
    """
    if torch.jit.is_scripting() or torch.jit.is_tracing():
        return False  # the file that comes of it must load without this package
    if steps == 1 and skip_scale == 1.0 and branch_scale == 1.0 and (os.environ.get(VARIABLE) or "auto") == "auto":
        return False
    return has_kernel(x, f_x, steps)


def skip_norm(
    x: Tensor,
    f_x: Tensor,
    gains: list[Tensor],
    biases: list[Tensor],
    skip_scale: float = 1.0,
    branch_scale: float = 1.0,
    eps: float = 1e-5,
    rms: bool = False,
) -> Tensor:
    """``y_1 = norm_1(skip_scale * x + branch_scale * F)``, ``y_k = norm_k(skip_scale * x + y_{k-1})``, as one operator.

    Eq. 3 of Liu et al. 2020 with one gain and ``skip_scale`` λ, Eq. 4 with λ gains and ``skip_scale`` 1.

    Args:
        x, f_x: of one shape ``(..., dim)``, in any floating types.
        gains: each step's gain of shape ``(dim,)``, one or more.
        biases: as many biases, or none.
        rms: RMS normalisation in layer normalisation's place.

    Returns ``x``'s dtype, with moments taken in at least fp32. Backward keeps ``x`` and ``f_x`` and recomputes what
    lies between.
    """
    if not torch.jit.is_scripting() and not torch.jit.is_tracing() and has_kernel(x, f_x, len(gains)):
        return kernel(x, f_x, gains, biases, skip_scale, branch_scale, eps, rms)
    return reference.skip_norm(x, f_x, gains, biases, skip_scale, branch_scale, eps, rms)


@torch.jit.unused
def has_kernel(x: Tensor, f_x: Tensor, steps: int, mixed: bool = False) -> bool:
    device = x.device.type
    if device not in _LOADERS or f_x.device != x.device:
        return False
    if x.dtype not in _DTYPES or f_x.dtype not in _DTYPES:
        return False
    if torch.compiler.is_compiling():
        # what is not there yet is not built while a graph is traced; an exported graph must run without this package
        return not _is_exporting() and device in _backends and _backends[device].takes(x.size(-1), steps, mixed)
    if type(x) not in _PLAIN or type(f_x) not in _PLAIN or _is_transformed():
        return False
    return in_use(device).takes(x.size(-1), steps, mixed)


def _is_exporting() -> bool:
    return getattr(torch.compiler, "is_exporting", lambda: False)()


def _is_transformed() -> bool:
    """Whether torch.func (vmap, grad, ...) or forward-mode differentiation is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def _choose(device: str) -> Backend:
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise UserError(f"{VARIABLE}={choice!r}: expected one of {', '.join(CHOICES)}")
    if choice not in ("auto", device):
        return Backend("reference", f"{VARIABLE}={choice}")
    try:
        return Backend(device, _LOADERS[device]())
    except Exception as error:  # whatever keeps a kernel from this machine, the reference computes the same
        reason = str(error).strip().split("\n")[0][:300]
        warnings.warn(f"skip connections run without their {device} operator: {reason}", RuntimeWarning, stacklevel=2)
        return Backend("reference", reason)


def _load_cpu() -> str:
    from . import cpu

    return f"built at {cpu.load()}"


def _load_cuda() -> str:
    from . import cuda

    _limits["cuda"] = cuda.fits
    return cuda.load(library)


_LOADERS: dict[str, Callable[[], str]] = {"cpu": _load_cpu, "cuda": _load_cuda}
_backends: dict[str, Backend] = {}
_limits: dict[str, Callable[[int, int, bool], bool]] = {}


def _output(x, f_x, gains, biases, skip_scale, branch_scale, eps, rms) -> Tensor:
    return x.new_empty(x.shape)


def gradients_shared(x: Tensor, f_x: Tensor, steps: int, skip_scale: float, branch_scale: float) -> bool:
    """Whether the gradients of ``x`` and ``f_x`` are one tensor; the operator then returns it once."""
    return steps == 1 and skip_scale == branch_scale and x.dtype == f_x.dtype


def _gradients(
    gradient, x, f_x, gains, biases, skip_scale, branch_scale, eps, rms, wanted_x, wanted_f, wanted_params
) -> list[Tensor]:
    shared = wanted_x and gradients_shared(x, f_x, len(gains), skip_scale, branch_scale)
    found = [x.new_empty(x.shape)] if wanted_x else []
    if wanted_f and not shared:
        found.append(f_x.new_empty(f_x.shape))
    if wanted_params:
        found.extend(parameter.new_empty(parameter.shape) for parameter in (*gains, *biases))
    return found


library = torch.library.Library("fairseq_rskip", "DEF")
library.define(f"skip_norm({_ARGUMENTS}) -> Tensor")
library.define(f"skip_norm_reference({_ARGUMENTS}) -> Tensor")
library.define(
    f"skip_norm_backward(Tensor gradient, {_ARGUMENTS}, bool wanted_x, bool wanted_f, bool wanted_params) -> Tensor[]"
)
kernel = torch.ops.fairseq_rskip.skip_norm.default  # skip_norm without a question, where takes() said yes
library.impl("skip_norm", _output, "Meta")
library.impl("skip_norm_backward", _gradients, "Meta")
library.impl("skip_norm_reference", reference.skip_norm, "CompositeImplicitAutograd")
