"""Safe loading of checkpoints: what comes back, what is refused, and that nothing in a refused file
runs.
"""

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


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", list(exploits("m")))
def test_exploits_are_named_and_do_not_run(tmp_path, name, legacy):
    marker = tmp_path / "ran"
    obj, named = exploits(marker)[name]
    path = tmp_path / "bad.pt"
    torch.save({"model": obj}, path, _use_new_zipfile_serialization=not legacy)
    for options in (
        {},
        {"weights_only": False, "pickle_module": pickle},
    ):  # no caller can turn the check off
        with pytest.raises(UnsafeCheckpointError) as caught:
            load_checkpoint(path, **options)
        assert not marker.exists()
        assert (
            named in str(caught.value)
            and str(path) in str(caught.value)
            and "\n" not in str(caught.value)
        )
    with contextlib.suppress(Exception):  # what an exploit returns need not fit where it stands
        torch.load(path, weights_only=False)
    assert marker.exists(), "the exploit must be real, or the test shows nothing"


FORGED = {
    "a look-alike of numpy": b"cnumpy.evil\nscalar\n(tR.",
    "an attribute of an allowed class": b"\x80\x02cargparse\nNamespace.__init__\n(tR.",
    "getattr of a module": (
        b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'getcwd'\ntR(tR."
    ),
    "numpy.dtype of objects": pickle.dumps(
        State(numpy.dtype, ("O", False, True), (3, "|", *[None] * 3, -1, -1, 0)), 2
    ),
    "an array of objects": pickle.dumps(numpy.array([{}], dtype=object), 2),
    "an opcode that torch never writes": b"\x80\x02(S'echo'\niposix\nsystem\n.",
}


@pytest.mark.parametrize("name", list(FORGED))
def test_forged_pickles_are_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "bad.pt", "w") as archive:  # as torch.save writes it
        for member, content in {
            "data.pkl": FORGED[name],
            "version": "3\n",
            "byteorder": "little",
        }.items():
            archive.writestr(f"archive/{member}", content)
    with pytest.raises(
        CheckpointError, match="bad.pt" if "opcode" in name else "bad.pt: it asks for "
    ):
        load_checkpoint(tmp_path / "bad.pt")


def test_everything_a_checkpoint_may_hold_comes_back(tmp_path):
    weight = torch.nn.Parameter(torch.randn(3, 33))
    state = {
        "args": argparse.Namespace(arch="transformer", lr=[0.1], task=None),
        "model": OrderedDict(w=weight, h=torch.ones(2).half(), i=torch.tensor(3), tied=weight.data),
        "best": numpy.float64(0.1),
        "step": numpy.int64(7),
        "plain": [None, True, 1, 2**70, 1.5, "é", (1, 2), b"bytes"],
    }
    kinds = [
        "int8",
        "uint16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "bool",
        ">i4",
    ]
    arrays = [numpy.arange(6).astype(kind).reshape(2, 3) for kind in kinds] + [
        numpy.array(2.5),
        numpy.ones((2, 3)).T,
    ]
    state["metrics"] = [("bleu", (array, {"sum": argparse.Namespace(x=array)})) for array in arrays]
    state["model"]._metadata = {"version": 2}
    torch.save(state, tmp_path / "ok.pt")
    loaded = load_checkpoint(tmp_path / "ok.pt", map_location="cpu")
    assert loaded["args"] == state["args"] and loaded["plain"] == state["plain"]
    assert loaded["best"] == 0.1 and loaded["step"] == 7
    assert loaded["model"]._metadata == {"version": 2}
    assert all(torch.equal(loaded["model"][name], value) for name, value in state["model"].items())
    assert loaded["model"]["w"].data_ptr() == loaded["model"]["tied"].data_ptr()
    for (_, (actual, nested)), array in zip(loaded["metrics"], arrays, strict=True):
        for copy in (actual, nested["sum"].x):
            assert (
                type(copy) is numpy.ndarray
                and copy.dtype == array.dtype
                and numpy.array_equal(copy, array)
            )
            assert copy.shape == array.shape and copy.flags.writeable


def test_tensors_are_put_where_they_are_asked_for(tmp_path):
    """Those of a GPU on the CPU, on a machine without one."""
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pt")
    assert load_checkpoint(tmp_path / "a.pt", map_location="meta")["w"].is_meta


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing():
    """torch itself loads a tensor of other numbers: it does not compare the zip's check sums."""
    state, whole, refused = {"w": torch.arange(3.0)}, io.BytesIO(), 0
    torch.save(state, whole)
    for place in range(len(whole.getvalue())):
        damaged = bytearray(whole.getvalue())
        damaged[place] ^= 1
        try:
            assert torch.equal(load_checkpoint(io.BytesIO(damaged))["w"], state["w"]), (
                place
            )  # padding, dates
        except CheckpointError:
            refused += 1
    assert refused > 100


def test_a_torn_or_missing_file_or_torchscript_says_so(tmp_path):
    torch.jit.save(
        torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1)), str(tmp_path / "script.pt")
    )
    with pytest.raises(UnsafeCheckpointError, match="TorchScript"):
        load_checkpoint(tmp_path / "script.pt")
    torch.save({"model": torch.zeros(1000)}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    for torn in (
        *(whole[:size] for size in (0, 1, 100, len(whole) // 2, len(whole) - 1)),
        b"a text",
        b"Plain text",
    ):
        (tmp_path / "torn.pt").write_bytes(torn)
        with pytest.raises(
            CheckpointError, match="torn.pt: truncated, or not a checkpoint"
        ) as caught:
            load_checkpoint(tmp_path / "torn.pt")
        assert "\n" not in str(caught.value) and (
            len(torn) > 99 or str(caught.value).endswith("not a checkpoint")
        )
    with pytest.raises(CheckpointError, match="none.pt does not exist"):
        load_checkpoint(tmp_path / "none.pt")


def test_settings_are_read_as_eval_would_and_nothing_else_is():
    for text in (
        "(0.9, 0.98)",
        "[(512, 10, 5)] + [(512, 3, 2)] * 4",
        "-1e-3",
        "True",
        "{'a': [1, 2]}",
        "1,2",
    ):
        assert safe_load.literal(text) == eval(text)
    refused = [
        "__import__('os').system('true')",
        "open",
        "[x for x in (1,)]",
        "(1).__class__",
        "lambda: 0",
        "1 / 2",
    ]
    refused += [
        "",
        "(",
        "2 ** 9",
        "[0] * 10 ** 9",
        "'a' * 90000 * 90000",
        "f'{1}'",
        "[1] + 1",
        "(" * 500 + ")" * 500,
    ]
    for text in refused:
        with pytest.raises(UserError, match="cannot read the setting"):
            safe_load.literal(text)


@pytest.mark.skipif(
    importlib.util.find_spec("fairseq._today") is None, reason="not our wheel of fairseq"
)
@pytest.mark.slow
def test_a_poisoned_checkpoint_stops_every_command_in_one_line(tiny_corpus, tmp_path):
    sizes = [
        f"--{side}-{size}"
        for side in ("encoder", "decoder")
        for size in ("layers=1", "embed-dim=16")
    ]
    options = (
        "--optimizer=adam --lr=0.1 --max-tokens=200 --cpu --max-update=1 --disable-validation "
        "--save-dir"
    ).split()
    run_checked(["fairseq-train", tiny_corpus, "--arch=transformer", *sizes, *options, tmp_path])
    marker, path = tmp_path / "ran", tmp_path / "checkpoint_last.pt"
    generate = ["fairseq-generate", tiny_corpus, "--path", path, "--cpu"]
    hydra = [
        "fairseq-hydra-train",
        "task=translation",
        f"task.data={tiny_corpus}",
        "optimizer=adam",
    ]
    hydra += [
        "+model={_name:transformer,encoder_layers:1,decoder_layers:1}",
        "criterion=cross_entropy",
    ]
    hydra += [
        "common.cpu=true",
        "dataset.max_tokens=200",
        f"checkpoint.save_dir={tmp_path}",
        "hydra.run.dir=.",
    ]
    pickled, setting = load_checkpoint(path), load_checkpoint(path)
    pickled["extra_state"]["hidden"] = Call(os.system, touch(marker))
    setting["cfg"]["model"].arch = setting["cfg"]["model"]._name = "fconv"
    setting["cfg"]["model"].encoder_layers = f"__import__('os').system({touch(marker)!r})"
    refused = f"refused checkpoint {path}: it asks for posix."
    for state, command, refusal in (
        (pickled, generate, refused),
        (pickled, hydra, refused),
        (setting, generate, "cannot read the setting"),
    ):
        torch.save(state, path)
        done = run_command(command, cwd=tmp_path)
        assert (
            done.returncode == 1
            and not marker.exists()
            and "Traceback" not in done.stderr + done.stdout
        )
        errors = [
            line for line in done.stderr.splitlines() if not re.match(r"\[?\d{4}-\d\d-\d\d", line)
        ]
        assert errors[-1].startswith(f"error: {refusal}")
