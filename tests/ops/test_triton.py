"""The Triton kernels without a card.

They are run by Triton's interpreter, and compiled for sm_80 and sm_90.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import test_ops
import torch
from conftest import run_command

from fairseq_rskip.ops import dispatch, in_use
from fairseq_rskip.ops.operator import operator

pytest.importorskip("triton")

CASES = "post_norm one_feature odd short_20 short_64 prime".split()
CASES += "expanded equal_scales rms rms_short no_bias empty".split()
MIXED = "bfloat branch_half gains_wide".split()
# shape, steps, options, types
TRIED = [*(test_ops.CASES[name] for name in CASES), ((2, 8192), 1, {}), ((2, 4096), 2, {})]
TRIED += [((9, 40), 4, {"branch_scale": 0.5}, test_ops.MIXED[name]) for name in MIXED]
TRIED += [((10, 2048), 2, {})]  # rows of two turns: six programs of one row each run at once


def test_the_kernels_equal_eq4():
    """In a process of its own: Triton chooses its interpreter when it is imported."""
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run_command([sys.executable, __file__], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [*map(str, range(len(TRIED))), "overflow", "strided"]


def run_by_the_interpreter():
    """Run the kernels on the CPU, over buffers of NaN; prints the name of each case that holds."""
    from fairseq_rskip.ops import cuda

    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    cuda.register("CPU")

    def skip_norm(x, f_x, gains, biases, skip_scale=1.0, branch_scale=1.0, eps=1e-5, rms=False):
        return operator(x, f_x, gains, biases, None, None, skip_scale, branch_scale, eps, rms)[0]

    for number, case in enumerate(TRIED):
        test_ops.check(SimpleNamespace(skip_norm=skip_norm), *case)
        print(number)

    check_overflow(skip_norm)
    print("overflow")
    check_strided(skip_norm)
    print("strided")


def check_overflow(skip_norm):
    """A row whose variance overflows is NaN, and the next row is as ever."""
    x, f_x, gain = torch.ones(2, 32), torch.zeros(2, 32), torch.ones(32)
    x[0], x[1] = torch.linspace(1e25, 2e25, 32), torch.linspace(1, 2, 32)
    for steps in (1, 3):
        y = skip_norm(x, f_x, [gain] * steps, [gain] * steps)
        assert y[0].isnan().all() and y[1].isfinite().all()


def check_strided(skip_norm):
    """The kernels read rows that lie one after the other; a transposed tensor's do not."""

    def results(x, f_x, gain, bias, gradient):
        leaves = [x, f_x, gain, bias]
        for leaf in leaves:
            leaf.requires_grad_()
        y = skip_norm(x, f_x, [gain] * 2, [bias] * 2)
        return [y, *torch.autograd.grad(y, leaves, gradient)]

    generator = torch.Generator().manual_seed(1)
    x, f_x, gradient = torch.randn(3, 5, 32, 7, generator=generator).transpose(2, 3)
    gain, bias = torch.randn(32, 2, generator=generator).unbind(1)
    strided = [x, f_x, gain, bias, gradient]
    assert not any(tensor.is_contiguous() for tensor in strided)
    actual = results(*(tensor.detach() for tensor in strided))
    expected = results(*(tensor.contiguous().detach() for tensor in strided))
    assert all(map(torch.equal, actual, expected))


class Compiler:
    """Stand for a kernel.

    A launch compiles it for ``architecture`` and keeps it and the log of ptxas.
    """

    def __init__(self, kernel, architecture, results):
        self.kernel, self.architecture, self.results = kernel, architecture, results

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            with contextlib.redirect_stdout(io.StringIO()) as log:
                compiled = self.kernel.warmup(*arguments, grid=grid, **options)
            self.results.append((compiled, log.getvalue()))

        return launch


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Return a function (architecture, function of ops.cuda, arguments).

    It returns the kernels which the call launches.
    """
    knobs = pytest.importorskip("triton.knobs")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from fairseq_rskip.ops import cuda

    try:
        knobs.nvidia.ptxas.path  # noqa: B018
    except RuntimeError:
        pytest.skip("needs ptxas, which Triton's wheel brings")
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = cuda._forward, cuda._backward

    def compile_for(architecture, function, *arguments):
        target = GPUTarget("cuda", architecture, 32)
        card = SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: architecture,
            get_current_stream=lambda device: 0,
        )
        monkeypatch.setattr(type(driver), "active", card)
        results = []
        for kernel in kernels:
            monkeypatch.setattr(cuda, kernel.__name__, Compiler(kernel, architecture, results))
        function(*arguments)
        return results

    return compile_for


def norm_and_backward(width, steps, dtype, rms=False, rows=64):
    """A forward and a backward pass."""
    from fairseq_rskip.ops import cuda

    x, row = torch.ones(rows, width, dtype=dtype), torch.ones(width, dtype=dtype)
    gains, biases, options = [row] * steps, [] if rms else [row] * steps, (1.0, 1.0, 1e-5, rms)
    _, moments = cuda.forward(x, x, gains, biases, None, None, *options)
    cuda.backward(x, None, x, x, gains, biases, None, None, moments, *options)


def spilled(log):
    """Bytes a thread that a kernel stores for want of registers."""
    (stores,) = re.findall(r"(\d+) bytes spill stores", log)
    return int(stores)


def test_the_kernels_are_compiled_once_for_batches_of_any_size(compiled):
    def batches():
        for rows in (64, 63, 1, 4097):
            norm_and_backward(128, 2, torch.float16, rows=rows)

    kernels = [kernel for kernel, _ in compiled(90, batches)]
    assert len(kernels) == 8 and len(set(map(id, kernels))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("width", [512, 1024])
@pytest.mark.parametrize(
    "architecture, dtype", [(80, torch.bfloat16), (90, torch.float16)], ids=["sm_80", "sm_90"]
)
def test_nothing_spills_at_the_widths_of_the_presets(architecture, dtype, width, compiled):
    variants = [*((steps, False) for steps in (1, 2, 3, 4)), (2, True)]
    bytes_spilled = {}
    for steps, rms in variants:
        logs = [
            log for _, log in compiled(architecture, norm_and_backward, width, steps, dtype, rms)
        ]
        assert len(logs) == 2
        bytes_spilled[steps, rms] = [spilled(log) for log in logs]
    assert bytes_spilled == dict.fromkeys(variants, [0, 0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a card")
def test_kernels_that_do_not_run_leave_the_work_to_torch(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_backends", {})
    monkeypatch.setenv("RSKIP_OPS", "cuda")
    assert in_use("cuda").name == "torch"
    assert "without their cuda operator" in caplog.text


def test_the_kernels_are_chosen_by_name_alone_and_registered_once(operators):
    operators("auto")
    assert in_use("cuda") == ("torch", "RSKIP_OPS=auto; RSKIP_OPS=cuda chooses Triton's kernels")
    words = "from fairseq_rskip.ops import cuda; cuda.register(); cuda.register()"
    subprocess.run([sys.executable, "-c", words], check=True)


def test_larger_inputs_mixtures_and_fp64_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(dispatch, "_backends", {"cuda": dispatch.Backend("cuda", "a test")})
    monkeypatch.setattr(dispatch, "_PLAIN", (SimpleNamespace,))

    def taken(dim, steps, mixed=False, dtype=torch.float16):
        x = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=torch.Size([2, dim]))
        return dispatch.should_fuse(x, x, dim, steps, 2.0, mixed=mixed)

    assert taken(8192, 1) and taken(4096, 2) and taken(2048, 4)
    assert not (taken(8193, 1) or taken(4097, 2) or taken(2049, 3) or taken(512, 5))
    assert not (taken(512, 4, mixed=True) or taken(512, 2, dtype=torch.float64))


if __name__ == "__main__":
    run_by_the_interpreter()
