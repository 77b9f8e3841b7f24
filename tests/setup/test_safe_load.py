"""Safe loading of checkpoints: what comes back, what is refused, and that nothing in a refused file runs."""

import argparse
import contextlib
import importlib.util
import io
import os
import pickle
import re
import zipfile
from collections import OrderedDict

import numpy
import pytest
import torch
from conftest import run_checked, run_command
from exploits import Call, State, exploits, touch

from fairseq_rskip import safe_load
from fairseq_rskip.errors import UserError
from fairseq_rskip.safe_load import CheckpointError, UnsafeCheckpointError, load_checkpoint


@pytest.fixture(params=["own list", "restricted unpickler"])
def way_to_load(request, monkeypatch):
    """torch >= 2.6 takes our list by name; older ones get an unpickler, which must give the same."""
    if request.param == "restricted unpickler":
        monkeypatch.setattr(safe_load, "_torch_at_least", lambda major, minor: False)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", list(exploits("m")))
def test_exploits_are_named_and_do_not_run(tmp_path, way_to_load, name, legacy):
    marker = tmp_path / "ran"
    obj, named = exploits(marker)[name]
    path = tmp_path / "bad.pt"
    torch.save({"model": obj}, path, _use_new_zipfile_serialization=not legacy)
    for options in ({}, {"weights_only": False, "pickle_module": pickle}):  # no caller can turn the check off
        with pytest.raises(UnsafeCheckpointError) as caught:
            load_checkpoint(path, **options)
        assert not marker.exists()
        assert named in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)
    with contextlib.suppress(Exception):  # what an exploit returns need not fit where it stands
        torch.load(path, weights_only=False)
    assert marker.exists(), "the exploit must be real, or the test shows nothing"


def write_pickle(path, data):
    """A file as torch.save writes it, around pickle opcodes of our own."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return path


FORGED = {
    "a look-alike of numpy": b"cnumpy.evil\nscalar\n(tR.",
    "a look-alike of omegaconf": b"comegaconf.dictconfig\nDictConfig\n(tR.",
    "an attribute of an allowed class": b"\x80\x02cargparse\nNamespace.__init__\n(tR.",
    "getattr of a module": b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'getcwd'\ntR(tR.",
    "numpy.dtype of objects": pickle.dumps(State(numpy.dtype, ("O", False, True), (3, "|", *[None] * 3, -1, -1, 0)), 2),
    "an array of objects": pickle.dumps(numpy.array([{}], dtype=object), 2),
    "a structured array": pickle.dumps(numpy.zeros(2, dtype=[("a", "i4")]), 2),
    "an opcode that torch never writes": b"\x80\x02(S'echo'\niposix\nsystem\n.",
}


@pytest.mark.parametrize("name", list(FORGED))
def test_forged_pickles_are_refused(tmp_path, way_to_load, name):
    refusal = "bad.pt" if "opcode" in name else "bad.pt: it asks for "
    with pytest.raises(CheckpointError, match=refusal):
        load_checkpoint(write_pickle(tmp_path / "bad.pt", FORGED[name]))


def test_torchscript_is_refused(tmp_path):
    class Doubler(torch.nn.Module):
        def forward(self, x):
            return 2 * x

    torch.jit.save(torch.jit.trace(Doubler(), torch.ones(1)), str(tmp_path / "script.pt"))
    with pytest.raises(UnsafeCheckpointError, match="TorchScript"):
        load_checkpoint(tmp_path / "script.pt")


def arrays():
    for kind in ("int8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64", "bool", ">i4"):
        yield numpy.arange(6).astype(kind).reshape(2, 3)
    yield from (numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)), numpy.zeros((1, 4)), numpy.array(2.5))


def test_everything_a_checkpoint_may_hold_comes_back(tmp_path, way_to_load):
    weight = torch.nn.Parameter(torch.randn(3, 33))
    state = {
        "args": argparse.Namespace(arch="transformer", lr=[0.1], task=None),
        "model": OrderedDict(w=weight, h=torch.ones(2).half(), i=torch.tensor(3), tied=weight.data),
        "best": numpy.float64(0.1),
        "step": numpy.int64(7),
        "plain": [None, True, 1, 2**70, 1.5, "é", (1, 2), b"bytes"],
        "metrics": [("bleu", (array, {"sum": argparse.Namespace(x=array)})) for array in arrays()],
    }
    state["model"]._metadata = {"version": 2}
    torch.save(state, tmp_path / "ok.pt")
    loaded = load_checkpoint(tmp_path / "ok.pt", map_location="cpu")
    assert loaded["args"] == state["args"] and loaded["plain"] == state["plain"]
    assert loaded["best"] == 0.1 and loaded["step"] == 7
    assert loaded["model"]._metadata == {"version": 2}
    assert all(torch.equal(loaded["model"][name], value) for name, value in state["model"].items())
    assert loaded["model"]["w"].data_ptr() == loaded["model"]["tied"].data_ptr()
    assert len(loaded["metrics"]) == len(state["metrics"])
    for (_, (found, nested)), array in zip(loaded["metrics"], arrays()):
        for copy in (found, nested["sum"].x):
            assert type(copy) is numpy.ndarray and copy.dtype == array.dtype and numpy.array_equal(copy, array)
            assert copy.shape == array.shape and copy.flags.writeable


def test_numpy_1_and_2_write_different_names(tmp_path, way_to_load):
    data = pickle.dumps(numpy.arange(3), 2)
    for old, new in ((b"numpy._core.", b"numpy.core."), (b"numpy.core.", b"numpy._core.")):
        path = write_pickle(tmp_path / "ok.pt", data.replace(old, new))
        assert load_checkpoint(path).tolist() == [0, 1, 2]


class NamedBytes(io.BytesIO):
    name = "flipped.pt"


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing():
    """torch itself loads a tensor of other numbers: it does not compare the zip's check sums."""
    state = {"model": {"w": torch.arange(3.0)}, "step": 1}
    whole = io.BytesIO()
    torch.save(state, whole)
    whole = whole.getvalue()
    refused = []
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        try:
            loaded = load_checkpoint(NamedBytes(damaged))
        except CheckpointError as error:
            refused.append(str(error))
        else:  # padding, dates and the like
            assert loaded["step"] == 1 and torch.equal(loaded["model"]["w"], state["model"]["w"]), place
    assert "cannot read checkpoint flipped.pt: damaged (Bad CRC-32 for file 'archive/data/0')" in refused


@pytest.mark.skipif(not hasattr(torch.serialization, "set_crc32_options"), reason="needs torch 2.6")
def test_a_checkpoint_without_check_sums_loads(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save([1], tmp_path / "ok.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert load_checkpoint(tmp_path / "ok.pt") == [1]


def test_a_torn_or_missing_file_says_so(tmp_path):
    torch.save({"model": torch.zeros(1000)}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "torn.pt").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="torn.pt: truncated, or not a checkpoint") as caught:
            load_checkpoint(tmp_path / "torn.pt")
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="none.pt: No such file"):
        load_checkpoint(tmp_path / "none.pt")


SETTINGS = ["(0.9, 0.98)", "[(512, 10, 5)] + [(512, 3, 2)] * 4", "0.1", "-1e-3", "True", "None", "{'a': [1, 2]}"]
SETTINGS += ["((32, 3), ) * 2", "  [1, 2 - 3]", "'x'", "1,2", "{1, 2}", "3 * [0]", "[1] * 400 + [2] * 400"]
NOT_SETTINGS = ["__import__('os').system('true')", "open", "f(1)", "[x for x in (1,)]", "(1).__class__", "lambda: 0"]
NOT_SETTINGS += ["1 / 2", "", "(", "2 ** 9", "[0] * 10 ** 9", "[0] * 1000000000", "'a' * 90000 * 90000", "f'{1}'"]
NOT_SETTINGS += ["-[1]", "[1] + 1", "(" * 500 + ")" * 500]


def test_settings_are_read_as_eval_would_and_nothing_else_is():
    for text in SETTINGS:
        assert safe_load.literal(text) == eval(text.strip()), text
    for text in NOT_SETTINGS:
        with pytest.raises(UserError, match="cannot read the setting"):
            safe_load.literal(text)
    with pytest.raises(TypeError):  # as with eval
        safe_load.literal(True)


needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("fairseq._today") is None, reason="fairseq did not come from scripts/build_fairseq.py"
)


def fairseq_train(corpus, folder):
    sizes = [f"--{side}-{size}" for side in ("encoder", "decoder") for size in ("layers=1", "embed-dim=16")]
    command = ["fairseq-train", corpus, "--arch=transformer", *sizes, "--encoder-attention-heads=2", "--max-update=1"]
    options = ["--decoder-attention-heads=2", "--optimizer=adam", "--lr=0.1", "--max-tokens=200", "--cpu"]
    return [*command, *options, "--no-epoch-checkpoints", "--disable-validation", "--save-dir", folder]


@pytest.fixture(scope="module")
def stock_checkpoint(tiny_corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    run_checked(fairseq_train(tiny_corpus, folder))
    return folder / "checkpoint_last.pt"


@needs_wheel
@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "validate", "interactive", "resume", "hydra"])
def test_a_poisoned_checkpoint_stops_the_command_in_one_line(tiny_corpus, stock_checkpoint, tmp_path, command):
    marker, path = tmp_path / "ran", tmp_path / "checkpoint_last.pt"
    state = load_checkpoint(stock_checkpoint)
    state["extra_state"]["hidden"] = Call(os.system, touch(marker))
    torch.save(state, path)
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
    state = load_checkpoint(stock_checkpoint)
    state["cfg"]["model"].arch = state["cfg"]["model"]._name = "fconv"
    state["cfg"]["model"].encoder_layers = f"__import__('os').system({touch(tmp_path / 'ran')!r})"
    torch.save(state, tmp_path / "bad.pt")
    done = run_command(["fairseq-generate", tiny_corpus, "--path", tmp_path / "bad.pt", "--cpu"])
    assert done.returncode == 1 and not (tmp_path / "ran").exists()
    assert "error: cannot read the setting" in done.stderr and "Traceback" not in done.stderr
