"""The services of fairseq_rskip/compat.py, and what commands do with a poisoned checkpoint."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run_command
from exploits import Call, touch

from fairseq_rskip import compat


def in_a_process(program):
    return run_command([sys.executable, "-c", "from fairseq_rskip import compat\ncompat.prepare()\n" + program])


def test_a_user_error_is_one_line_and_exit_status_1():
    done = in_a_process("compat.prepare()\nraise compat.UnsafeCheckpointError('what to do')")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "error: what to do\n")


def test_other_errors_keep_their_traceback_and_the_hook_that_was_there():
    done = in_a_process("raise KeyError('x')")
    assert done.returncode == 1 and "Traceback" in done.stderr and "KeyError: 'x'" in done.stderr
    program = "import sys\nsys.excepthook = lambda *_: print('mine')\n"
    done = run_command([sys.executable, "-c", f"{program}from fairseq_rskip import compat; compat.prepare(); 1/0"])
    assert done.stdout == "mine\n"


def test_exit_on_user_error():
    def fail(kind):
        raise kind("why")

    with pytest.raises(SystemExit, match="error: why"):
        compat.exit_on_user_error(fail, compat.UserError)
    with pytest.raises(KeyError):
        compat.exit_on_user_error(fail, KeyError)
    assert compat.exit_on_user_error(max, 1, 2) == 2


def test_prepare_twice_adds_nothing():
    compat.prepare()
    hook = sys.excepthook
    compat.prepare()
    assert sys.excepthook is hook


LOADING_AHEAD = """
import torch
from fairseq.data.iterators import BufferedIterator

class Batches:
    def __len__(self):
        return 10**9
    def __iter__(self):
        while True:
            yield torch.ones(300, 300) @ torch.ones(300, 300)

batches = BufferedIterator(10**9, Batches())
next(batches)
print("read one", flush=True)
"""


def test_a_process_ends_well_while_a_thread_still_loads_batches():
    """Stock fairseq aborts here, as it may after --max-update has ended a run in the middle of an epoch."""
    done = run_command([sys.executable, "-c", LOADING_AHEAD])
    assert (done.returncode, done.stdout, done.stderr) == (0, "read one\n", "")


class FairseqOfAnotherOrigin:
    """What apply() meets where fairseq did not come from our wheel: the same modules without ``_today``."""

    PROGRAM = """
import sys, types, numpy, torch, fairseq
from fairseq_rskip import compat
vars(fairseq).pop("_today", None)
original = torch.load
compat.apply(); compat.apply()
import fairseq.checkpoint_utils, fairseq.distributed.utils, fairseq.utils
from fairseq.models.transformer import TransformerConfig
from fairseq.modules import TransformerEncoderLayer
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase as Layer
config = TransformerConfig(); config.encoder.embed_dim = 8; config.encoder.ffn_embed_dim = 8
config.encoder.attention_heads = 2
layer = Layer(config)
assert layer.can_use_fastpath is False
assert not hasattr(Layer.__init__.__wrapped__, "__wrapped__"), "wrapped twice"
assert fairseq.checkpoint_utils.torch.load is compat.load_checkpoint
assert fairseq.checkpoint_utils.torch.Tensor is torch.Tensor and torch.load is original
assert fairseq.distributed.utils.torch.load.keywords == {"weights_only": False}
assert fairseq.utils.eval is compat.literal
assert fairseq.file_io.shutil.copyfile is compat.copy_whole and fairseq.file_io.shutil.move
assert fairseq.models.distributed_fairseq_model.DistributedDataParallel.args[0].__name__ == "DistributedDataParallel"
assert numpy.float is float and numpy.int is int and numpy.compat.long is int
torch.jit.script(layer)
print("fine")
"""


def test_a_copy_cut_off_half_way_leaves_the_old_file(tmp_path, monkeypatch):
    (tmp_path / "new").write_text("new")
    (tmp_path / "last").write_text("old")

    def cut_off(source, destination):
        Path(destination).write_text("n")
        raise OSError("disk full")

    with monkeypatch.context() as broken, pytest.raises(OSError):
        broken.setattr(compat.shutil, "copyfile", cut_off)
        compat.copy_whole(tmp_path / "new", tmp_path / "last")
    assert (tmp_path / "last").read_text() == "old"
    compat.copy_whole(tmp_path / "new", tmp_path / "last")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"new": "new", "last": "new"}


def test_hydra_overrides_of_a_named_node_may_add_keys():
    given = ["task=translation", "task.data=x", "model._name=a", "model.skip_lambda=3", "+model.y=1", "common.cpu=true"]
    assert compat.hydra_overrides(given) == [
        "task=translation", "task.data=x", "++model._name=a", "++model.skip_lambda=3", "+model.y=1", "common.cpu=true"
    ]


def test_apply_serves_a_fairseq_of_another_origin():
    done = run_command([sys.executable, "-c", FairseqOfAnotherOrigin.PROGRAM])
    assert done.stdout.endswith("fine\n"), done.stderr[-2000:]


needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("fairseq._today") is None, reason="fairseq did not come from scripts/build_fairseq.py"
)


@needs_wheel
def test_the_wheel_holds_these_very_files():
    import fairseq

    for module, name in ((fairseq._today, "compat.py"), (fairseq.safe_load, "safe_load.py")):
        with open(module.__file__, "rb") as file:
            assert file.read() == (ROOT / "fairseq_rskip" / name).read_bytes(), "build the wheel again"


@pytest.fixture(scope="module")
def stock_checkpoint(tiny_corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    done = run_command(fairseq_train(tiny_corpus, folder))
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "checkpoint_last.pt"


def fairseq_train(corpus, folder, arch="transformer"):
    sizes = [f"--{side}-{size}" for side in ("encoder", "decoder") for size in ("layers=1", "embed-dim=16")]
    command = ["fairseq-train", corpus, "--arch", arch, *sizes, "--encoder-attention-heads=2", "--max-update=1"]
    options = ["--decoder-attention-heads=2", "--optimizer=adam", "--lr=0.1", "--max-tokens=200", "--cpu"]
    return [*command, *options, "--no-epoch-checkpoints", "--disable-validation", "--save-dir", folder]


def poison(source, target, obj):
    state = torch.load(source, weights_only=False)
    state["extra_state"]["hidden"] = obj
    torch.save(state, target)
    return target


@needs_wheel
@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "validate", "interactive", "resume", "hydra"])
def test_a_poisoned_checkpoint_stops_the_command_in_one_line(tiny_corpus, stock_checkpoint, tmp_path, command):
    marker = tmp_path / "ran"
    path = poison(stock_checkpoint, tmp_path / "checkpoint_last.pt", Call(os.system, touch(marker)))
    commands = {
        "generate": ["fairseq-generate", tiny_corpus, "--path", path, "--cpu"],
        "validate": ["fairseq-validate", tiny_corpus, "--task=translation", "--path", path, "--cpu", "--max-tokens=9"],
        "interactive": ["fairseq-interactive", tiny_corpus, "--path", path, "--cpu"],
        "resume": fairseq_train(tiny_corpus, tmp_path),
        "hydra": ["fairseq-hydra-train", "task=translation", f"task.data={tiny_corpus}", "optimizer=adam"]
        + ["+model={_name:transformer,encoder_layers:1,decoder_layers:1}", "criterion=cross_entropy", "hydra.run.dir=."]
        + ["common.cpu=true", "dataset.max_tokens=200", f"checkpoint.save_dir={tmp_path}"],
    }
    done = run_command(commands[command], cwd=tmp_path, input="a b\n")
    assert done.returncode == 1 and not marker.exists()
    errors = [line for line in done.stderr.splitlines() if not re.match(r"\[?\d{4}-\d\d-\d\d", line)]
    assert errors[-1].startswith(f"error: refused checkpoint {path}: it asks for posix.system")
    assert "Traceback" not in done.stderr + done.stdout


@needs_wheel
@pytest.mark.slow
def test_settings_in_a_checkpoint_are_not_evaluated(tiny_corpus, stock_checkpoint, tmp_path):
    state = torch.load(stock_checkpoint, weights_only=False)
    state["cfg"]["model"].arch = state["cfg"]["model"]._name = "fconv"
    state["cfg"]["model"].encoder_layers = f"__import__('os').system({touch(tmp_path / 'ran')!r})"
    torch.save(state, tmp_path / "bad.pt")
    done = run_command(["fairseq-generate", tiny_corpus, "--path", tmp_path / "bad.pt", "--cpu"])
    assert done.returncode == 1 and not (tmp_path / "ran").exists()
    assert "error: cannot read the setting" in done.stderr and "Traceback" not in done.stderr
