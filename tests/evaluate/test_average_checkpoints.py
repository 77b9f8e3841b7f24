"""rskip average against means in float64, and what it must refuse."""

import argparse
import math
from collections import OrderedDict

import pytest
import torch

from fairseq_rskip.residual import SkipConnection
from fairseq_rskip.tools.average import choose, main, parse
from fairseq_rskip.tools.evaluate.weights import average


def write(path, model, **more):
    torch.save({"args": argparse.Namespace(arch="x"), "model": OrderedDict(model), **more}, path)
    return path


def random_model(seed):
    generator = torch.Generator().manual_seed(seed)
    tied = torch.randn(5, 3, generator=generator)
    return {
        "embed": tied,
        "output": tied,
        "half": torch.randn(4, 33, generator=generator).half() * 100,
        "bf16": torch.randn(7, generator=generator).bfloat16(),
        "double": torch.randn(1, generator=generator).double(),
        "steps": torch.tensor(10 + seed),
        "flag": torch.tensor([True, False]),
    }


def test_the_mean_is_the_float64_mean_rounded_once(tmp_path):
    models = [random_model(seed) for seed in range(3)]
    paths = [write(tmp_path / f"{seed}.pt", model, n=seed) for seed, model in enumerate(models)]
    assert main(["--inputs", *map(str, paths), "--output", str(tmp_path / "out.pt")]) == 0
    out = torch.load(tmp_path / "out.pt", weights_only=False)
    assert list(out["model"]) == list(models[0])
    for name in ("embed", "output", "half", "bf16", "double"):
        expected = torch.stack([model[name].double() for model in models]).mean(0).to(models[0][name].dtype)
        assert out["model"][name].dtype == models[0][name].dtype
        assert torch.equal(out["model"][name], expected), name
    assert out["n"] == 0
    assert out["args"] == argparse.Namespace(arch="x")


def test_the_average_keeps_the_rule_that_its_weights_belong_to(tmp_path):
    states = [SkipConnection(5, "xskip", skip_lambda=2).state_dict() for _ in range(2)]
    paths = [tmp_path / f"{number}.pt" for number in range(2)]
    for path, state in zip(paths, states):
        torch.save({"args": argparse.Namespace(arch="x"), "model": state}, path)
    averaged = average(paths)["model"]
    SkipConnection(5, "xskip", skip_lambda=2).load_state_dict(averaged)
    with pytest.raises(RuntimeError, match="was saved with skip_lambda=2: expected 3"):
        SkipConnection(5, "xskip", skip_lambda=3).load_state_dict(averaged)


def test_counters_come_from_the_first_tied_weights_stay_tied_and_the_optimizer_state_is_left_out(tmp_path):
    paths = [write(tmp_path / f"{seed}.pt", random_model(seed), last_optimizer_state={"a": 1}) for seed in (5, 1)]
    state = average(paths)
    model = state["model"]
    assert model["steps"].item() == 15 and model["flag"].tolist() == [True, False]
    assert model["embed"].data_ptr() == model["output"].data_ptr() and "last_optimizer_state" not in state


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--num-epoch-checkpoints", "2"], (10.0 + 9.0) / 2),
        (["--num-update-checkpoints", "3"], (1200.0 + 1000.0 + 900.0) / 3),
        (["--num-update-checkpoints", "1"], 1200.0),
    ],
)
def test_the_last_checkpoints_are_chosen_by_number_not_by_name(tmp_path, options, expected):
    for epoch in (1, 2, 9, 10):
        write(tmp_path / f"checkpoint{epoch}.pt", {"w": torch.tensor([float(epoch)])})
    for epoch, update in ((9, 900), (10, 1000), (10, 1200)):
        write(tmp_path / f"checkpoint_{epoch}_{update}.pt", {"w": torch.tensor([float(update)])})
    write(tmp_path / "checkpoint_last.pt", {"w": torch.tensor([-1.0])})
    options = parse(["--inputs", str(tmp_path), "--output", "x", *options])
    value = average(choose(options))["model"]["w"].item()
    assert value == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"w": torch.zeros(2), "more": torch.zeros(1)}, ["more is in", "b.pt", "but not in", "a.pt"]),
        ({"v": torch.zeros(2)}, ["w is in", "a.pt", "but not in", "b.pt"]),
        ({"w": torch.zeros(3)}, ["w is (2,)", "(3,)"]),
        ({"w": torch.zeros(2).half()}, ["torch.float32", "torch.float16"]),
        ({"w": torch.zeros(2), "n": torch.arange(3)}, ["n is torch.int64 and differs"]),
    ],
)
def test_models_that_differ_are_refused_by_name(tmp_path, capsys, other, words):
    more = {"n": torch.zeros(3, dtype=torch.int64)} if "n" in other else {}
    paths = [write(tmp_path / "a.pt", {"w": torch.zeros(2), **more}), write(tmp_path / "b.pt", other)]
    assert main(["--inputs", *map(str, paths), "--output", str(tmp_path / "out.pt")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: cannot average: ") and len(error.splitlines()) == 1
    assert all(word in error for word in words), error
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--inputs", "none.pt"], "none.pt: No such file"),
        (["--inputs", "."], "is a folder: add --num-epoch-checkpoints"),
        (["--inputs", ".", "--num-epoch-checkpoints", "3"], "holds 0 epoch checkpoints, 3 are needed"),
        (["--inputs", "torn.pt"], "torn.pt: truncated, or not a checkpoint"),
        (["--inputs", "empty.pt"], "empty.pt: truncated, or not a checkpoint"),
        (["--inputs", "list.pt"], "list.pt is not a fairseq checkpoint"),
        (["--inputs", "good.pt", "nan.pt"], "nan.pt cannot be used: w holds NaN or infinity"),
        (["--inputs", "bare.pt"], "bare.pt holds an empty model"),
        (["--inputs", "cifar.pt"], "cifar.pt is not a fairseq checkpoint: it has no settings"),
        (["--inputs", "unset.pt"], "unset.pt is not a fairseq checkpoint: it has no settings"),
        (["--inputs", "whole.pt"], "whole.pt has no floating-point weights"),
        (["--inputs", "text.pt"], "text.pt is not a fairseq checkpoint: w is a str, not a tensor"),
        (["--inputs", "good.pt", "--num-epoch-checkpoints", "3"], "needs one folder as --inputs"),
        (["--inputs", "good.pt", "--output", "no/where.pt"], "cannot write no/where.pt"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    good = write(tmp_path / "good.pt", {"w": torch.zeros(200)}).read_bytes()
    (tmp_path / "torn.pt").write_bytes(good[: len(good) // 2])
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save([1, 2], tmp_path / "list.pt")
    write(tmp_path / "nan.pt", {"w": torch.full((200,), math.nan)})
    write(tmp_path / "bare.pt", {})
    write(tmp_path / "text.pt", {"w": "words"})
    write(tmp_path / "whole.pt", {"w": torch.arange(4)})
    torch.save({"cfg": None, "args": None, "model": {"w": torch.zeros(2)}}, tmp_path / "unset.pt")
    torch.save({"format": "fairseq_rskip.vision 1", "model": {"w": torch.zeros(2)}}, tmp_path / "cifar.pt")
    output = [] if "--output" in options else ["--output", "out.pt"]
    assert main([*options, *output]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out.pt").exists()
