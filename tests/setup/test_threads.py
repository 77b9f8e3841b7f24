"""How OpenMP's threads wait, as libgomp itself says when torch loads it."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "fairseq_rskip.tools", "describe", "resnet20"],
        ["scripts/train_cifar.py", "--data", "digits", "--depth", "21"],
        ["scripts/reproduce.py", "list", "table1"],
    ],
    ids=["rskip", "train_cifar", "reproduce"],
)
@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, 1000), ({"GOMP_SPINCOUNT": "7"}, 7), ({"OMP_WAIT_POLICY": "passive"}, 0)],
    ids=["default", "count", "policy"],
)
def test_threads_sleep_soon_unless_the_environment_says_otherwise(command, given, spins):
    waiting = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in waiting}
    environment |= {**given, "OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    said = set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr))
    if not said:
        pytest.skip("torch has an OpenMP that is not GNU's")
    assert said == {str(spins)}
