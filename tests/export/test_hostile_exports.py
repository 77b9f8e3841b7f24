"""Exports that somebody made to do harm: one line, before memory or time is spent."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

import fairseq_rskip
from fairseq_rskip import pretrained
from fairseq_rskip.errors import UserError


def refused(function, *arguments):
    """The one line with which ``function`` refuses."""
    with pytest.raises(UserError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path):
    """An export whose config.json is to be written by the test."""
    save_file({"weight": torch.zeros(2, 3)}, tmp_path / pretrained.WEIGHTS)
    return tmp_path


CONFIGS = {
    "nested brackets": ("[" * 100_000, "its brackets are nested too deeply"),
    "two megabytes": (" " * 2**21, "it has 2,097,152 bytes, at most 1,048,576 are read"),
    "not JSON": ("{", "Expecting property name"),
    "Hugging Face's": ('{"model_type": "gpt2"}', "without --transformers"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_hostile_config_is_refused(folder, case):
    text, words = CONFIGS[case]
    (folder / pretrained.CONFIG).write_text(text)
    assert words in refused(fairseq_rskip.from_pretrained, folder)


POSITIONS = {
    "translation": "max_source_positions",
    "language_model": "max_target_positions",
}


@pytest.mark.parametrize("value", [10_000_000, 0, "many", True], ids=str)
@pytest.mark.parametrize("kind", POSITIONS)
def test_a_table_of_very_many_positions_is_never_made(folder, kind, value):
    pytest.importorskip("fairseq")
    model = dict.fromkeys(["max_source_positions", "max_target_positions", "tokens_per_sample"], 9)
    model[POSITIONS[kind]] = value
    config = {"source": "en", "target": "de", "architecture": "none", "model": model}
    config.update(format=pretrained.FORMAT, kind=kind)
    (folder / pretrained.CONFIG).write_text(json.dumps(config))
    (folder / "dict.txt").write_text("a 1\n")
    line = refused(fairseq_rskip.from_pretrained, folder)
    assert f"says {POSITIONS[kind]} {value}: expected an integer from 1 to 100,000" in line


def test_very_many_tensors_are_refused_unread(tmp_path):
    path = tmp_path / pretrained.WEIGHTS
    path.write_bytes(struct.pack("<Q", 63_233_344) + b"{")
    assert "its list of tensors has 63,233,344 bytes" in refused(pretrained.read_weights, path)


def test_layers_without_tensors_are_refused_before_the_model_is_built(folder):
    def make():
        raise AssertionError("built")

    line = refused(pretrained.fill, make, 10, folder, 12)
    assert line.endswith("model.safetensors has 1 tensors")


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_weights_of_another_type_are_refused(folder, kind):
    values = torch.ones(2, 3).to(kind)
    save_file({"weight": values}, folder / pretrained.WEIGHTS)
    line = refused(pretrained.fill, lambda: torch.nn.Linear(3, 2, bias=False), 1, folder)
    assert line.endswith(f"weight is of {kind}, expected torch.float32")


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_in_another_precision_are_read(folder, kind):
    values = torch.full((2, 3), 0.5, dtype=kind)
    save_file({"weight": values}, folder / pretrained.WEIGHTS)
    model = pretrained.fill(lambda: torch.nn.Linear(3, 2, bias=False), 1, folder)
    assert torch.equal(model.weight, torch.full((2, 3), 0.5))
