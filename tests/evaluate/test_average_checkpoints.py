"""rskip average against means in float64, and what it must refuse."""

import argparse
import math
from collections import OrderedDict

import pytest
import torch
from transformer_helpers import TINY, build

from fairseq_rskip.residual import create_skip, skips
from fairseq_rskip.tools.__main__ import main as rskip
from fairseq_rskip.tools.evaluate.weights import average


def write(path, model, **more):
    torch.save({"args": argparse.Namespace(arch="x"), "model": OrderedDict(model), **more}, path)
    return path


def run(output, *words):
    return rskip(["average", *map(str, words), "--output", str(output)])


def random_model(seed):
    generator = torch.Generator().manual_seed(seed)
    tied, half, bf16 = (torch.randn(size, generator=generator) for size in (15, 133, 7))
    tensors = {
        "embed": tied,
        "output": tied,
        "half": 100 * half.half(),
        "bf16": bf16.bfloat16(),
        "double": bf16.double(),
        "tied double": (double := bf16.double()),
        "tied double too": double,
    }
    return {**tensors, "steps": torch.tensor(10 + seed), "flag": torch.tensor([True, False])}


def test_the_mean_is_the_float64_mean_rounded_once(tmp_path):
    """Counters come from the first, and tied weights stay tied.

    The optimizer's state is left out.
    """
    models = [random_model(seed) for seed in (5, 1, 2)]
    more = {"n": 7, "last_optimizer_state": {"a": 1}}
    paths = [write(tmp_path / f"{index}.pt", model, **more) for index, model in enumerate(models)]
    assert run(tmp_path / "out.pt", "--inputs", *paths) == 0
    out = torch.load(tmp_path / "out.pt", weights_only=False)
    model = out.pop("model")
    assert list(model) == list(models[0]) and out == {"args": argparse.Namespace(arch="x"), "n": 7}
    for name in ("embed", "output", "half", "bf16", "double", "tied double", "tied double too"):
        expected = (
            torch.stack([model[name].double() for model in models])
            .mean(0)
            .to(models[0][name].dtype)
        )
        assert model[name].dtype == models[0][name].dtype and torch.equal(model[name], expected), (
            name
        )
    assert model["steps"].item() == 15 and model["flag"].tolist() == [True, False]
    assert model["embed"].data_ptr() == model["output"].data_ptr()


def test_the_average_keeps_the_rule_that_its_weights_belong_to(tmp_path):
    states = [create_skip("xskip", 5, skip_lambda=2).state_dict() for _ in range(2)]
    for number, state in enumerate(states):
        torch.save(
            {"args": argparse.Namespace(arch="x"), "model": state}, tmp_path / f"{number}.pt"
        )
    averaged = average([tmp_path / "0.pt", tmp_path / "1.pt"])["model"]
    create_skip("xskip", 5, skip_lambda=2).load_state_dict(averaged)
    with pytest.raises(RuntimeError, match="was saved with skip_lambda=2: expected 3"):
        create_skip("xskip", 5, skip_lambda=3).load_state_dict(averaged)


def test_models_of_two_rules_are_refused(tmp_path, capsys):
    """Their tensors have the same names and shapes."""
    paths = []
    for scale in (1, 3):
        state = create_skip("xskip", 5, skip_lambda=scale).state_dict()
        paths.append(tmp_path / f"{scale}.pt")
        torch.save({"args": argparse.Namespace(arch="x"), "model": state}, paths[-1])
    assert run(tmp_path / "out.pt", "--inputs", *paths) == 1
    error = capsys.readouterr().err
    assert "has skip_lambda=1 in " in error and "but 3 in" in error and error.count("\n") == 1


@pytest.mark.parametrize("kind", ["ngpt", "postln"])
def test_the_average_of_ngpt_alone_has_vectors_of_length_one(tmp_path, kind):
    """As after each update, in exactly the matrices that ``to_unit_length`` knows."""
    models = [build(f"transformer_{kind}_tiny", seed, **TINY) for seed in (1, 2)]
    for number, model in enumerate(models):
        state = {"args": argparse.Namespace(arch="x"), "model": model.state_dict()}
        torch.save(state, tmp_path / f"{number}.pt")
    averaged = average([tmp_path / "0.pt", tmp_path / "1.pt"])["model"]

    constrained = {}
    for skip in skips(models[0]).values():
        matrices = skip.matrices if kind == "ngpt" else []
        constrained |= {id(matrix.parameter): axis for matrix, axis in matrices}
    for name, parameter in models[0].named_parameters():
        mean = (parameter.detach() + models[1].get_parameter(name).detach()) / 2
        if id(parameter) in constrained:
            mean /= mean.norm(dim=constrained[id(parameter)], keepdim=True)
        torch.testing.assert_close(averaged[name], mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--last 3", (1200.0 + 1000.0 + 900.0) / 3),
        ("", (10.0 + 9.0 + 2.0 + 1.0) / 4),
    ],
)
def test_the_last_checkpoints_are_chosen_by_number_not_by_name(tmp_path, options, expected):
    numbers = {f"{epoch}": epoch for epoch in (1, 2, 9, 10)}
    numbers |= {"_9_900": 900, "_10_1000": 1000, "_10_1200": 1200, "_last": -1}
    for name, number in numbers.items():
        write(tmp_path / f"checkpoint{name}.pt", {"w": torch.tensor([float(number)])})
    assert run(tmp_path / "out.pt", "--inputs", tmp_path, *options.split()) == 0
    assert torch.load(tmp_path / "out.pt", weights_only=False)["model"][
        "w"
    ].item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"w": torch.zeros(2), "more": torch.zeros(1)},
            ["more is missing in", "a.pt but (1,) torch.float32 in"],
        ),
        ({"v": torch.zeros(2)}, ["w is (2,) torch.float32 in", "a.pt but missing in", "b.pt"]),
        ({"w": torch.zeros(3)}, ["w is (2,)", "(3,)"]),
        ({"w": torch.zeros(2).half()}, ["torch.float32", "torch.float16"]),
        ({"w": torch.zeros(2), "n": torch.arange(3)}, ["n is (3,) torch.int64 and differs"]),
    ],
)
def test_models_that_differ_are_refused_by_name(tmp_path, capsys, other, words):
    more = {"n": torch.zeros(3, dtype=torch.int64)} if "n" in other else {}
    paths = [
        write(tmp_path / "a.pt", {"w": torch.zeros(2), **more}),
        write(tmp_path / "b.pt", other),
    ]
    assert run(tmp_path / "out.pt", "--inputs", *paths) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: cannot average: ") and len(error.splitlines()) == 1
    assert all(word in error for word in words), error
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--inputs . good.pt", "--inputs . good.pt: expected one folder, or several files"),
        ("--inputs torn.pt", "torn.pt: truncated, or not a checkpoint"),
        ("--inputs good.pt nan.pt", "nan.pt cannot be used: w holds NaN or infinity"),
        (
            "--inputs bare.pt",
            "bare.pt is not a fairseq checkpoint: expected an entry 'model' with tensors",
        ),
        ("--inputs cifar.pt", "cifar.pt is not a fairseq checkpoint: it has no settings"),
        ("--inputs whole.pt", "whole.pt has no floating-point weights"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    good = write(tmp_path / "good.pt", {"w": torch.zeros(200)}).read_bytes()
    (tmp_path / "checkpoint_last.pt").write_bytes(good)
    (tmp_path / "torn.pt").write_bytes(good[: len(good) // 2])
    for name, model in (("bare", {}), ("whole", {"w": torch.arange(4)})):
        write(tmp_path / f"{name}.pt", model)
    write(tmp_path / "nan.pt", {"w": torch.full((200,), math.nan)})
    torch.save(
        {"format": "fairseq_rskip.vision 1", "model": {"w": torch.zeros(2)}}, tmp_path / "cifar.pt"
    )
    assert run("out.pt", *options.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out.pt").exists()


def test_five_checkpoints_of_a_folder_are_averaged_by_default(tmp_path):
    for epoch in range(1, 8):
        state = {"args": argparse.Namespace(arch="x"), "model": {"w": torch.tensor([2.0**epoch])}}
        torch.save(state, tmp_path / f"checkpoint{epoch}.pt")
    assert rskip(["average", "--inputs", str(tmp_path), "--output", str(tmp_path / "out.pt")]) == 0
    averaged = torch.load(tmp_path / "out.pt", weights_only=False)["model"]["w"]
    assert averaged.item() == torch.tensor((8 + 16 + 32 + 64 + 128) / 5).item()
