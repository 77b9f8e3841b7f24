"""Where the tests of this folder compute: on a GPU, or with RSKIP_TEST_DEVICE=cpu as a rehearsal on the CPU."""

import os

import pytest
import torch

DEVICE = os.environ.get("RSKIP_TEST_DEVICE", "cuda")
NEEDS_DEVICE = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def gpu_only(*values):
    """A parameter of a test that is left out on the CPU."""
    return pytest.param(*values, marks=pytest.mark.skipif(DEVICE == "cpu", reason="fp16 needs a GPU"))
