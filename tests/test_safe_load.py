"""Safe loading of checkpoints: what may come back, what is refused, and that nothing in a refused file runs."""

import argparse
import contextlib
import os
import pickle
import zipfile
from collections import OrderedDict

import numpy
import pytest
import torch
from exploits import Call, State, exploits

from fairseq_rskip import compat


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", list(exploits("m")))
def test_exploits_are_named_and_do_not_run(tmp_path, name, legacy):
    marker = tmp_path / "ran"
    obj, named = exploits(marker)[name]
    path = tmp_path / "bad.pt"
    torch.save({"model": obj}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(compat.UnsafeCheckpointError) as caught:
        compat.load_checkpoint(path)
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
}


@pytest.mark.parametrize("name", list(FORGED))
def test_forged_pickles_are_refused(tmp_path, name):
    path = write_pickle(tmp_path / "bad.pt", FORGED[name])
    with pytest.raises(compat.UnsafeCheckpointError, match="bad.pt: it asks for "):
        compat.load_checkpoint(path)


def test_an_opcode_that_torch_never_writes_is_refused(tmp_path):
    path = write_pickle(tmp_path / "bad.pt", b"\x80\x02(S'echo'\niposix\nsystem\n.")
    with pytest.raises(compat.CheckpointError, match="bad.pt"):
        compat.load_checkpoint(path)


def test_torchscript_is_refused(tmp_path):
    class Doubler(torch.nn.Module):
        def forward(self, x):
            return 2 * x

    torch.jit.save(torch.jit.trace(Doubler(), torch.ones(1)), str(tmp_path / "script.pt"))
    with pytest.raises(compat.UnsafeCheckpointError, match="TorchScript"):
        compat.load_checkpoint(tmp_path / "script.pt")


ARRAYS = [
    numpy.arange(6).astype(kind).reshape(2, 3)
    for kind in ("int8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64", "bool", ">i4")
] + [numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)), numpy.zeros((1, 4)), numpy.array(2.5)]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{list(a.shape)}")
def test_number_arrays_come_back(tmp_path, array):
    state = {"metrics": [("bleu", (array, {"sum": array}))], "args": argparse.Namespace(x=array)}
    torch.save(state, tmp_path / "ok.pt")
    state = compat.load_checkpoint(tmp_path / "ok.pt")
    found = [state["metrics"][0][1][0], state["metrics"][0][1][1]["sum"], state["args"].x]
    for copy in found:
        assert type(copy) is numpy.ndarray and copy.dtype == array.dtype and numpy.array_equal(copy, array)
        assert copy.shape == array.shape and copy.flags.writeable


def test_everything_a_checkpoint_may_hold_comes_back(tmp_path):
    weight = torch.nn.Parameter(torch.randn(3, 33))
    state = {
        "args": argparse.Namespace(arch="transformer", lr=[0.1], task=None),
        "model": OrderedDict(w=weight, h=torch.ones(2).half(), i=torch.tensor(3), tied=weight.data),
        "best": numpy.float64(0.1),
        "step": numpy.int64(7),
        "plain": [None, True, 1, 2**70, 1.5, "é", (1, 2), b"bytes"],
    }
    state["model"]._metadata = {"version": 2}
    torch.save(state, tmp_path / "ok.pt")
    loaded = compat.load_checkpoint(tmp_path / "ok.pt", map_location="cpu")
    assert loaded["args"] == state["args"] and loaded["plain"] == state["plain"]
    assert loaded["best"] == 0.1 and loaded["step"] == 7
    assert loaded["model"]._metadata == {"version": 2}
    assert all(torch.equal(loaded["model"][name], value) for name, value in state["model"].items())
    assert loaded["model"]["w"].data_ptr() == loaded["model"]["tied"].data_ptr()


def test_numpy_1_and_2_write_different_names(tmp_path):
    data = pickle.dumps(numpy.arange(3), 2)
    for old, new in ((b"numpy._core.", b"numpy.core."), (b"numpy.core.", b"numpy._core.")):
        path = write_pickle(tmp_path / "ok.pt", data.replace(old, new))
        assert compat.load_checkpoint(path).tolist() == [0, 1, 2]


def test_the_check_cannot_be_turned_off(tmp_path):
    torch.save(Call(os.getcwd), tmp_path / "bad.pt")
    with pytest.raises(compat.UnsafeCheckpointError), open(tmp_path / "bad.pt", "rb") as file:
        compat.load_checkpoint(file, weights_only=False, pickle_module=pickle)


@pytest.mark.parametrize("cut", [0, 1, 100, 0.5, -1])
def test_a_torn_file_says_so(tmp_path, cut):
    torch.save({"model": torch.zeros(1000)}, tmp_path / "torn.pt")
    data = (tmp_path / "torn.pt").read_bytes()
    (tmp_path / "torn.pt").write_bytes(data[: int(len(data) * cut) if isinstance(cut, float) else cut])
    with pytest.raises(compat.CheckpointError, match="torn.pt: truncated, or not a checkpoint") as caught:
        compat.load_checkpoint(tmp_path / "torn.pt")
    assert "\n" not in str(caught.value)


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(compat.CheckpointError, match="none.pt: No such file"):
        compat.load_checkpoint(tmp_path / "none.pt")


@pytest.mark.parametrize(
    "text",
    ["(0.9, 0.98)", "[(512, 10, 5)] + [(512, 3, 2)] * 4", "0.1", "-1e-3", "True", "None", "{'a': [1, 2]}"]
    + ["((32, 3), ) * 2", "  [1, 2 - 3]", "'x'", "1,2", "{1, 2}", "3 * [0]", "[1] * 400 + [2] * 400"],
)
def test_settings_are_read_as_eval_would(text):
    assert compat.literal(text) == eval(text.strip())


@pytest.mark.parametrize(
    "text",
    ["__import__('os').system('true')", "open", "f(1)", "[x for x in (1,)]", "(1).__class__", "lambda: 0"]
    + ["1 / 2", "", "(", "2 ** 9", "[0] * 10 ** 9", "[0] * 1000000000", "'a' * 90000 * 90000", "f'{1}'"]
    + ["-[1]", "[1] + 1", "(" * 500 + ")" * 500],
)
def test_other_settings_are_refused(text):
    with pytest.raises(compat.UserError, match="cannot read the setting"):
        compat.literal(text)


def test_a_setting_that_is_no_string_is_a_type_error_as_with_eval():
    with pytest.raises(TypeError):
        compat.literal(True)
