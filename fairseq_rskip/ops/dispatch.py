"""The recursive skip and its norms as one operator, and the choice of what computes it.

``torch.ops.fairseq_rskip.skip_norm`` has its schema here, its shapes for ``torch.compile`` and its derivative.
Two kernels implement it: ``cpu`` is C++ built on this machine, ``cuda`` is Triton, which torch brings. The environment
variable ``RSKIP_OPS`` chooses among ``CHOICES``.
"""

import logging
import os
import subprocess
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
_HALF_AND_FLOAT = (torch.float16, torch.bfloat16, torch.float32)
_DTYPES = {"cpu": _HALF_AND_FLOAT, "cuda": (*_HALF_AND_FLOAT, torch.float64)}
_PLAIN = (Tensor, torch.nn.Parameter)
logger = logging.getLogger(__name__)


class Backend(NamedTuple):
    """What computes the operator on one kind of device: ``name`` is cpu, cuda or reference, ``reason`` says why."""

    name: str
    reason: str


BUILDING = Backend("reference", "the CPU operator is being built in the background")


def in_use(device: str = "cpu", wait: bool = True) -> Backend:
    """What computes the operator for tensors on ``device``.

    The first look loads it. A CPU operator that is not built yet is built now, or, without ``wait``, by a process in
    the background while torch's operators compute. Raises ``UserError`` for an unknown ``RSKIP_OPS``.
    """
    backend = _backends.get(device)
    if backend is None or (backend is BUILDING and (wait or _builders[-1].poll() is not None)):
        backend = _backends[device] = _choose(device, wait)
    return backend


def takes(x: Tensor, f_x: Tensor, dim: int, steps: int, skip_scale: float = 1.0, branch_scale: float = 1.0) -> bool:
    """Whether :func:`kernel` computes these inputs, as rows of ``dim`` features, and should.

    ``RSKIP_OPS=auto`` leaves ``norm(x + F)`` to torch, the skip of stock fairseq, which is equal to stock bit for bit.
    """
    if steps == 1 and skip_scale == 1.0 and branch_scale == 1.0 and _choice() == "auto":
        return False
    return has_kernel(x, f_x, dim, steps)


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
        rms: RMS normalisation in place of layer normalisation.

    Returns ``x``'s dtype, with moments taken in at least fp32. Backward keeps ``x``, ``f_x`` and two numbers for each
    row and step, and recomputes the rest.
    """
    compute = kernel if has_kernel(x, f_x, x.size(-1), len(gains)) else reference.skip_norm
    return compute(x, f_x, gains, biases, skip_scale, branch_scale, eps, rms)


def kernel(x, f_x, gains, biases, skip_scale, branch_scale, eps, rms) -> Tensor:
    """:func:`skip_norm` without the question whether there is a kernel: for inputs that :func:`takes` accepts."""
    return _operator(x, f_x, gains, biases, skip_scale, branch_scale, eps, rms)


def has_kernel(x: Tensor, f_x: Tensor, dim: int, steps: int, mixed: bool = False) -> bool:
    """Whether a kernel computes the operator, or a mixture of so many steps, for these inputs as rows of ``dim``."""
    device = x.device.type
    dtypes = _DTYPES.get(device, ())
    if f_x.device != x.device or x.dtype not in dtypes or f_x.dtype not in dtypes:
        return False
    if torch.compiler.is_compiling():
        return not _is_exporting() and _is_node(device) and _fits(device, dim, steps, mixed)
    if type(x) not in _PLAIN or type(f_x) not in _PLAIN or _is_transformed():
        return False
    return in_use(device, wait=False).name != "reference" and _fits(device, dim, steps, mixed)


def _fits(device: str, features: int, steps: int, mixed: bool) -> bool:
    return device not in _limits or _limits[device](features, steps, mixed)


def _is_node(device: str) -> bool:
    """Whether the operator is a node of a graph. It waits for a build: what ran before must not decide."""
    return in_use(device).name != "reference"


def _choice() -> str:
    return os.environ.get(VARIABLE) or "auto"


# as torch.compiler.assume_constant_result does, which would import torch._dynamo, a second's work
_is_node._dynamo_marked_constant = _choice._dynamo_marked_constant = True


def _is_exporting() -> bool:
    return getattr(torch.compiler, "is_exporting", lambda: False)()


def _is_transformed() -> bool:
    """Whether torch.func (vmap, grad, ...) or forward-mode differentiation is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def _choose(device: str, wait: bool) -> Backend:
    choice = _choice()
    if choice not in CHOICES:
        raise UserError(f"{VARIABLE}={choice!r}: expected one of {', '.join(CHOICES)}")
    if choice not in ("auto", device):
        return Backend("reference", f"{VARIABLE}={choice}")
    try:
        if device == "cpu" and choice == "auto" and not wait and _is_being_built():
            return BUILDING
        return Backend(device, _LOADERS[device]())
    except Exception as error:  # whatever keeps a kernel from this machine, the reference computes the same
        reason = str(error).strip().split("\n")[0][:300]
        warnings.warn(f"skip connections run without their {device} operator: {reason}", RuntimeWarning, stacklevel=2)
        return Backend("reference", reason)


def _is_being_built() -> bool:
    """Start the process in the background where the operator is not built. Raises ``UserError`` where it failed."""
    from . import cpu

    if _builders:
        if _builders[-1].poll():
            raise UserError(_builders.pop().communicate()[1].strip() or "the build was killed")
        return _builders[-1].poll() is None
    if cpu.is_built():
        return False
    _builders.append(cpu.build_in_background())
    logger.warning("building the CPU operator of the skip connections in the background; torch computes until then")
    return True


def _load_cpu() -> str:
    from . import cpu

    _limits["cpu"] = lambda features, steps, mixed: features % 16 == 0 and features > 0
    return f"built at {cpu.load()}"


def _load_cuda() -> str:
    from . import cuda

    _limits["cuda"] = cuda.fits
    return cuda.load(library)


_LOADERS: dict[str, Callable[[], str]] = {"cpu": _load_cpu, "cuda": _load_cuda}
_backends: dict[str, Backend] = {}
_limits: dict[str, Callable[[int, int, bool], bool]] = {}  # what a kernel takes: features, steps, mixed
_builders: list[subprocess.Popen] = []


def second_derivative(function, ctx, tensors, upstream, needed) -> list[Tensor | None]:
    """The gradients of ``function`` at ``tensors`` as functions of them, for a second derivative."""
    copies = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]  # one tensor may be given twice
    outputs = function(*copies)
    pairs = [pair for pair in zip(outputs, upstream) if pair[1] is not None]
    wanted = [copy for copy, need in zip(copies, needed) if need]
    outputs, upstream = zip(*pairs)
    found = iter(torch.autograd.grad(outputs, wanted, upstream, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needed]


class SkipNorm(torch.autograd.Function):
    """The operator's derivative on CUDA, as ``recursive_skip.cpp`` has it for a CPU, where a node in C++ costs less."""

    @staticmethod
    def forward(ctx, options, steps, *tensors):
        ctx.options, ctx.steps = options, steps
        with torch._C._AutoDispatchBelowAutograd():
            y, moments = torch.ops.fairseq_rskip.skip_norm_moments.default(*_arguments(tensors, steps), *options)
        ctx.save_for_backward(moments, *tensors)
        return y

    @staticmethod
    def backward(ctx, gradient):
        moments, *tensors = ctx.saved_tensors
        arguments = _arguments(tensors, ctx.steps)
        if not torch.is_grad_enabled():
            backward = torch.ops.fairseq_rskip.skip_norm_moments_backward.default
            return (None, None, *backward(gradient, *arguments, moments, *ctx.options))

        def function(*tensors):
            return [reference.skip_norm(*_arguments(tensors, ctx.steps), *ctx.options)]

        needed = ctx.needs_input_grad[2:]
        return (None, None, *second_derivative(function, ctx, tensors, [gradient], needed))


def _arguments(tensors, steps):
    return tensors[0], tensors[1], list(tensors[2 : 2 + steps]), list(tensors[2 + steps :])


def with_derivative(x, f_x, gains, biases, *options) -> Tensor:
    """``skip_norm`` where autograd records; generation goes without the cost of a node."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, f_x, *gains, *biases)):
        return SkipNorm.apply(options, len(gains), x, f_x, *gains, *biases)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.fairseq_rskip.skip_norm.default(x, f_x, gains, biases, *options)


def _output(x, f_x, gains, biases, skip_scale, branch_scale, eps, rms) -> Tensor:
    return x.new_empty(x.shape)


def _output_and_moments(x, f_x, gains, *rest) -> tuple[Tensor, Tensor]:
    rows = x.numel() // max(x.size(-1), 1)
    return x.new_empty(x.shape), x.new_empty((2 * len(gains), rows), dtype=reference.computing_type(x, f_x, gains))


def _gradients(gradient, x, f_x, gains, biases, *rest) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (x, f_x, *gains, *biases)]


_WITH_MOMENTS = _ARGUMENTS.replace("biases,", "biases, Tensor moments,")
library = torch.library.Library("fairseq_rskip", "DEF")
library.define(f"skip_norm({_ARGUMENTS}) -> Tensor")
library.define(f"skip_norm_reference({_ARGUMENTS}) -> Tensor")
library.define(f"skip_norm_moments({_ARGUMENTS}) -> (Tensor, Tensor)")
library.define(f"skip_norm_moments_backward(Tensor gradient, {_WITH_MOMENTS}) -> Tensor[]")
library.impl("skip_norm", _output, "Meta")
library.impl("skip_norm_moments", _output_and_moments, "Meta")
library.impl("skip_norm_moments_backward", _gradients, "Meta")
library.impl("skip_norm_reference", reference.skip_norm, "CompositeImplicitAutograd")
_operator = torch.ops.fairseq_rskip.skip_norm.default
