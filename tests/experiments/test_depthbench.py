"""Who uses depth: the sizes of the models, and the test on tables whose answer is known."""

import argparse
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import yaml
from fairseq import models
from fairseq.data import Dictionary

import fairseq_rskip.models  # noqa: F401  (registers the architectures)

FOLDER = Path(__file__).parents[2] / "experiments"
DEPTHS = ("3 layers", "12 layers", "48 layers")


@pytest.mark.parametrize(
    ("name", "words", "size", "tolerance"),
    [("depthbench", 3976, 1.22e6, 0.03), ("gpu-depthbench", 8000, 15.0e6, 0.02)],
)
def test_every_depth_has_one_size(name, words, size, tolerance):
    """Embedding included, as the benchmark's authors count; ``words``: the text's subwords."""
    table = yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8"))
    dictionary = Dictionary()
    for number in range(words - len(dictionary)):
        dictionary.add_symbol(f"word{number}")
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    for column in table["columns"].values():
        options = {name.replace("-", "_"): value for name, value in column["options"].items()}
        assert options["decoder_embed_dim"] % options["decoder_attention_heads"] == 0
        given = argparse.Namespace(
            arch="transformer_lm_preln",
            max_target_positions=128,
            tokens_per_sample=128,
            share_decoder_input_output_embed=True,
            **options,
        )
        model = models.build_model(given, task)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == pytest.approx(size, rel=tolerance), column


def report(designs):
    lines = []
    for design, means in designs.items():
        for number, (depth, mean) in enumerate(zip(DEPTHS, means)):
            values = {}
            for seed in (1, 2, 3):
                values[seed] = round(mean + 0.1 * seed + 0.001 * (-1) ** (seed + number), 4)
            line = {"column": depth, "row": design, "values_by_seed": json.dumps(values)}
            line |= {"metric": "valid_loss", "seeds_planned": 3}
            swept = [{"options": {"lr": lr}, "result": 5.0} for lr in (0.1, 0.2, 0.4)]
            chosen = {"lr": 0.4 if mean > 5.1 else 0.2}
            lines.append({**line, "swept": json.dumps(swept), "chosen": json.dumps(chosen)})
    return pandas.DataFrame(lines)


def test_a_depth_with_some_rates_lies_between_those_beside_it_or_outside(
    tmp_path, capsys, monkeypatch
):
    lines = []
    for design, middle in (("a", 5.1), ("b", 5.3)):
        for depth, results in zip(DEPTHS, ([5.4, 5.0], [middle, None], [5.4, 5.2])):
            swept = [{"options": {"lr": n}, "result": each} for n, each in enumerate(results)]
            values = {} if None in results else {1: min(results)}
            line = {"column": depth, "row": design, "values_by_seed": json.dumps(values)}
            line |= {"metric": "valid_loss", "seeds_planned": 1, "chosen": "{}"}
            lines.append({**line, "swept": json.dumps(swept)})
    pandas.DataFrame(lines).to_csv(tmp_path / "report.csv", index=False)
    words = [str(tmp_path / "report.csv"), "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["depthbench", *words])
    with pytest.raises(SystemExit):
        runpy.run_path(str(FOLDER / "depthbench.py"), run_name="__main__")
    beside = "3 layers (5.000) and 48 layers (5.200)"
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"a, 12 layers: 5.100, between {beside}",
        f"b, 12 layers: 5.300, outside {beside}",
    ]


def test_a_design_gains_loses_or_is_open(tmp_path, capsys, monkeypatch):
    path = tmp_path / "report.csv"
    designs = {"a": [5.0, 4.8, 4.7], "b": [5.0, 4.9, 5.2], "c": [5.0, 4.9, 5.0]}
    report(designs).to_csv(path, index=False)
    monkeypatch.setattr(sys, "argv", ["depthbench", str(path), "--output", str(tmp_path)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(FOLDER / "depthbench.py"), run_name="__main__")
    out, error = capsys.readouterr()
    end, *said = (out + error).splitlines()[-4:]
    assert end == "b, 48 layers: lr 0.4 is an end of the sweep"
    assert said[0].startswith("a: gains from depth: 48 layers minus 3 layers -0.300 bits (")
    assert said[0].endswith("; best at 48 layers, 4.900 bits")
    assert said[1].startswith("b: loses by depth: ") and "best at 12 layers" in said[1]
    assert said[2].startswith("c: open: ")
    table = pandas.read_csv(tmp_path / "depthbench_gains.csv")
    assert list(table["depth"][:3]) == list(DEPTHS) and pandas.isna(table["difference"][0])


SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "experiments" / "depthbench.py"))


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.3, -0.01, "gains from depth"),
        (-0.3, 0.01, "open"),
        (-0.01, 0.3, "open"),
        (0.01, 0.3, "loses by depth"),
    ],
)
def test_a_verdict_needs_the_whole_interval_on_one_side(low, high, said):
    first = {"design": "a", "depth": "3 layers", "loss": 5.0}
    difference = (low + high) / 2
    last = {"design": "a", "depth": "48 layers", "loss": 5.0 + difference}
    last |= {"difference": difference, "low": low, "high": high}
    (sentence,) = SCRIPT["verdicts"]([first, last])
    assert sentence.startswith(f"a: {said}: 48 layers minus 3 layers ")
