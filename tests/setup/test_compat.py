"""What the patched fairseq calls in fairseq_rskip/compat.py, and what the wheel's patches do that a
user can see.
"""

import argparse
import errno
import importlib.util
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_command

from fairseq_rskip import compat

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("fairseq._today") is None,
    reason="fairseq did not come from tools/build_fairseq.py",
)


def test_errors_of_the_user_and_of_the_disk_are_one_line(monkeypatch, capsys):
    others = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: others.append(error))
    with warnings.catch_warnings():
        compat.prepare()
    full = OSError(errno.ENOSPC, "No space left on device", "a.pt")
    over = OSError(errno.EDQUOT, "Disk quota exceeded", "b.pt")
    for cause in (
        compat.UserError("what to do"),
        compat.UnsafeCheckpointError("why"),
        full,
        over,
        KeyError("x"),
    ):
        error = RuntimeError("torch's")
        error.__cause__ = cause
        sys.excepthook(RuntimeError, error, None)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "error: what to do",
        "error: why",
        "error: No space left on device: a.pt",
        "error: Disk quota exceeded: b.pt",
    ] and others == [error]
    with pytest.raises(SystemExit, match="error: cannot read the setting"):
        compat.exit_on_user_error(compat.literal, "what(")


def test_only_settings_of_a_node_that_names_its_class_are_added_for_hydra():
    words = ["model._name=x", "model.layers=3", "optimizer.lr=1", "task=translation", "--help"]
    expected = ["++model._name=x", "++model.layers=3", *words[2:]]
    assert compat.hydra_overrides(words) == expected


LOADING_AHEAD = """
import itertools, torch
from fairseq.data.iterators import BufferedIterator

class Batches:
    __len__ = lambda self: 10**9
    __iter__ = lambda self: (torch.ones(300, 300) @ torch.ones(300, 300) for _ in itertools.count())

batches = BufferedIterator(10**9, Batches())
next(batches)
print("read one", flush=True)
"""


@needs_wheel
def test_a_process_ends_well_while_a_thread_still_loads_batches():
    """Stock fairseq aborts here, as it may after --max-update has ended a run in the middle of an
    epoch.
    """
    done = run_command([sys.executable, "-c", LOADING_AHEAD])
    assert (done.returncode, done.stdout, done.stderr) == (0, "read one\n", "")


STOCK = """
import sys
sys.modules["fairseq._today"], sys.excepthook = None, sys.__excepthook__
import fairseq_rskip.models
from fairseq.models import ARCH_MODEL_REGISTRY
raise fairseq_rskip.compat.UserError("transformer_rskip_ln" in ARCH_MODEL_REGISTRY)
"""


def test_with_a_fairseq_of_another_origin_the_plugin_says_what_it_lacks():
    done = run_command(["python-with-fairseq", STOCK])
    assert done.returncode == 1 and done.stderr.endswith("error: True\n")
    assert (
        "did not come from tools/build_fairseq.py: it reads checkpoints without"
        in done.stdout + done.stderr
    )


USER_DIR = f"""
import argparse
import fairseq_rskip.residual
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.utils import import_user_module
for _ in range(2):
    import_user_module(argparse.Namespace(user_dir={str(ROOT / "fairseq_rskip")!r}))
from fairseq.dataclass.utils import interpret_dc_type
is_int = interpret_dc_type(int | None) is interpret_dc_type(int) is int
print("transformer_rskip_ln" in ARCH_MODEL_REGISTRY, is_int)
"""


@needs_wheel
def test_user_dir_registers_architectures_and_reads_python_3_14s_types():
    """Although the package was imported before."""
    assert run_command(["python-with-fairseq", USER_DIR]).stdout == "True True\n"


@needs_wheel
@pytest.mark.parametrize("ema_fp32", [False, True])
def test_a_moving_average_copies_counters(ema_fp32):
    """Stock fairseq multiplies them by the decay and fails."""
    from fairseq.models.ema.ema import EMA

    config = {"ema_decay": 0.5, "ema_seed_model": None, "ema_fp32": ema_fp32}
    config |= {"ema_start_update": 0, "ema_update_freq": 1}
    norm = torch.nn.BatchNorm1d(2)
    average = EMA(norm, argparse.Namespace(**config))
    norm(torch.tensor([[1.0, 4.0], [3.0, 8.0]]))
    norm.weight.data.fill_(3.0)
    average.step(norm, 1)
    averaged = average.get_model()
    assert averaged.num_batches_tracked == 1
    assert averaged.weight.tolist() == [2.0, 2.0]  # (1 + 3) / 2
    torch.testing.assert_close(averaged.running_mean, norm.running_mean / 2)


def test_a_copy_cut_off_half_way_leaves_the_old_file(tmp_path, monkeypatch):
    new, last = tmp_path / "new", tmp_path / "last"
    new.write_text("new")
    last.write_text("old")

    def cut_off(_source, destination):
        Path(destination).write_text("n")
        raise OSError("disk full")

    with monkeypatch.context() as full, pytest.raises(OSError, match="disk full"):
        full.setattr(compat.shutil, "copyfile", cut_off)
        compat.copy_whole(new, last)
    assert last.read_text() == "old" and sorted(tmp_path.iterdir()) == [last, new]
    compat.copy_whole(new, last)
    assert last.read_text() == "new" and sorted(tmp_path.iterdir()) == [last, new]
