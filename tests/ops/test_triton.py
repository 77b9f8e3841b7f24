"""The Triton kernels without a card: run by Triton's interpreter, and compiled for sm_80 and sm_90."""

import contextlib
import io
import os
import re
import sys
from types import SimpleNamespace

import pytest
import test_ops
import torch
from conftest import run_command

from fairseq_rskip.ops import dispatch, in_use
from fairseq_rskip.ops.operator import operator

pytest.importorskip("triton")

CASES = """post_norm one_feature odd short_20 short_64 long prime expanded equal_scales rms no_bias empty""".split()
MIXTURES = "short_20 post_norm one_feature rms_short empty".split()
MIXED = "double bfloat branch_half".split()
# mode, shape, steps, options, types; six steps are a chain of launches
TRIED = [("norm", *test_ops.CASES[name]) for name in CASES]
TRIED += [("norm", (9, 40), 6, {"branch_scale": 0.5}, test_ops.MIXED[name]) for name in MIXED]
TRIED += [(mode, *test_ops.CASES[name]) for mode in test_ops.MODES[1:] for name in MIXTURES]
TRIED += [(mode, (9, 40), 3, {}, test_ops.MIXED[name]) for mode in test_ops.MODES[1:] for name in MIXED[:2]]


def test_the_kernels_equal_the_reference():
    """In a process of its own: Triton chooses its interpreter when it is imported."""
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run_command([sys.executable, __file__], env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [str(number) for number in range(len(TRIED))]


def run_by_the_interpreter():
    """Run the kernels on the CPU, over buffers of NaN; prints the number of each case that agrees."""
    from fairseq_rskip.ops import cuda

    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    cuda.register("CPU")

    def mix(x, f_x, gains, biases, weights=None, direction=None, skip_scale=1.0, branch_scale=1.0, eps=1e-5, rms=False):
        y, p = operator(x, f_x, gains, biases, weights, direction, skip_scale, branch_scale, eps, rms)
        return y, weights if direction is None else p

    kernels = SimpleNamespace(skip_norm=lambda *rows, **options: mix(*rows, **options)[0], skip_mix=mix)
    for number, (mode, *case) in enumerate(TRIED):
        test_ops.check(kernels, *case, mode=mode)
        print(number)


class Compiler:
    """Stands for a kernel: a launch compiles it for ``architecture`` and keeps it and the log of ptxas."""

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
    """A function (architecture, function of ops.cuda, arguments) that returns the kernels which the call launches."""
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


def norm_and_backward(width, steps, dtype, rms=False, mode=None):
    """The arguments of a forward and a backward pass on 64 rows."""
    from fairseq_rskip.ops import cuda

    x, row = torch.ones(64, width, dtype=dtype), torch.ones(width, dtype=dtype)
    gains, biases, options = [row] * steps, [] if rms else [row] * steps, (1.0, 1.0, 1e-5, rms)
    direction = row if mode == "halting" else None
    weights = None if mode is None else torch.ones(steps - (mode == "halting"), dtype=dtype)
    _, kept = cuda.forward(x, x, gains, biases, weights, direction, *options)
    cuda.backward(x, None, x, x, gains, biases, weights, direction, kept, *options)


def spilled(log):
    """Bytes a thread that a kernel stores for want of registers."""
    (stores,) = re.findall(r"(\d+) bytes spill stores", log)
    return int(stores)


@pytest.mark.slow
@pytest.mark.parametrize("width", [512, 1024])
@pytest.mark.parametrize("architecture, dtype", [(80, torch.bfloat16), (90, torch.float16)], ids=["sm_80", "sm_90"])
def test_nothing_spills_at_the_widths_of_the_presets(architecture, dtype, width, compiled):
    variants = [(steps, False, None) for steps in (1, 2, 3, 4)]
    variants += [(2, True, None), (4, False, "constant"), (4, False, "halting")]
    bytes_spilled = {}
    for variant in variants:
        logs = [log for _, log in compiled(architecture, norm_and_backward, width, variant[0], dtype, *variant[1:])]
        assert len(logs) == 2
        bytes_spilled[variant] = [spilled(log) for log in logs]
    assert bytes_spilled == dict.fromkeys(variants, [0, 0])


def test_a_long_recursion_is_a_chain_of_launches(compiled):
    results = compiled(90, norm_and_backward, 512, 6, torch.float16)
    assert [kernel.name for kernel, _ in results] == ["_forward"] * 3 + ["_backward"] * 2  # backward repeats one
    assert sum(spilled(log) for _, log in results if log) == 0


def test_fp64_numbers_reach_the_kernel_as_fp64(compiled):
    for kernel, _ in compiled(90, norm_and_backward, 16, 1, torch.float64):
        assert {kernel.src.signature[name] for name in ("skip", "branch", "eps")} == {"fp64"}
        assert kernel.asm["ptx"].count(".param .f64") == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a card")
def test_kernels_that_do_not_run_leave_the_work_to_torch(monkeypatch):
    monkeypatch.setattr(dispatch, "_backends", {})
    with pytest.warns(RuntimeWarning, match="without their cuda operator"):
        assert in_use("cuda").name == "reference"


def test_larger_inputs_are_left_to_torch():
    taken = [(8192, 32, False), (2048, 4, True)]
    left = [(8193, 2, False), (512, 33, False), (512, 5, True), (2049, 2, True)]
    assert [dispatch._fits("cuda", *each) for each in taken + left] == [True] * 2 + [False] * 4


if __name__ == "__main__":
    run_by_the_interpreter()
