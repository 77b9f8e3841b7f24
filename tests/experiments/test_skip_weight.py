"""experiments/skip_weight.py: the gradient that the weights of x leave, beside what is measured."""

import importlib.util
import io
import json
import math
import sys

import pandas
import pytest
import torch
from conftest import ROOT, unpack

from fairseq_rskip.analysis import skip_log
from fairseq_rskip.residual import create_skip
from fairseq_rskip.tools.experiments.finished import finished_runs

spec = importlib.util.spec_from_file_location("skip_weight", ROOT / "experiments/skip_weight.py")
skip_weight = importlib.util.module_from_spec(spec)
spec.loader.exec_module(skip_weight)


@pytest.mark.parametrize(
    ("kind", "options", "t", "steps"),
    [
        ("xskip", {"skip_lambda": 3}, 2.0 / 3, 1),
        ("rskip", {"skip_lambda": 1}, 2.0, 1),
        ("rskip", {"skip_lambda": 4}, 2.0, 4),
    ],
)
@pytest.mark.parametrize("cosine", [-0.5, 0.0, 0.6, 1.0])
def test_the_weight_is_what_a_gradient_across_x_and_F_keeps(kind, options, t, steps, cosine):
    """Autograd of the skip itself, x with |F| = 2 |x|, and a gradient at right angles to both."""
    torch.manual_seed(1)
    dim = 64
    vectors = torch.randn(3, dim, dtype=torch.float64)
    vectors -= vectors.mean(-1, keepdim=True)  # no mean, as behind a layer norm
    x, across, gradient = torch.linalg.qr(vectors.T)[0].T * math.sqrt(dim)
    f_x = 2 * (cosine * x + math.sqrt(1 - cosine**2) * across)
    skip = create_skip(kind, dim, **options).double()
    x = x.clone().requires_grad_()
    skip(x[None], f_x[None]).backward(gradient[None])
    weight = skip_weight.weight_by_constants(t, cosine, steps)
    assert x.grad.norm() / gradient.norm() == pytest.approx(weight, rel=1e-4)  # eps of the norm


@pytest.fixture
def run(tmp_path):
    """2rSkip+LN in two layers, of which one residual each is logged."""
    options = {"decoder-layers": 2, "lr": 0.003, "skip-lambda": 2}
    settings = {"arch": "transformer_rskip_ln", "options": options}
    record = {"settings": settings, "seed": 1, "metrics": {"values": {"valid_loss": 5.0}}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    lines = skip_log.SkipLines(tmp_path, first=1)
    for step, bottom in ((10, 0.5), (20, 0.0)):
        values = {"skip_grad_norm/decoder.layers.0.final_skip": bottom}
        values["skip_grad_norm/decoder.layers.1.final_skip"] = 1.0
        values["skip_F_over_x/encoder.layers.0.final_skip"] = 9.0  # the encoder does not count
        values["skip_cos_y_x/encoder.layers.0.final_skip"] = 0.0
        for layer in (0, 1):
            block = f"decoder.layers.{layer}.final_skip"
            values |= {
                f"skip_F_over_x/{block}": 1.0,
                f"skip_cos_y_x/{block}": 0.5,
                f"skip_cos_x_F/{block}": 0.0,
                f"skip_cos_gradients/{block}": 0.5,
                f"skip_branch_over_skip_gradient/{block}": 0.1,
                f"skip_norm_after_sum/{block}": 1.0,
            }
        lines.write(step, values)
    (finished,) = finished_runs(tmp_path)
    return finished


def test_a_run_is_read_update_by_update(run):
    """|F| = |x| at right angles is 45 degrees, which the second step halves; a gradient may be 0.

    The weight of x after two steps is cos(pi / 8) + sin(pi / 8) * 0 along x: by hand
    (1 / sqrt 2 + 1) / |(1 + 1 / sqrt 2, 1 / sqrt 2)|.
    """
    first, second = skip_weight.read_run(run)
    assert first["angle_from_norms"] == second["angle_from_norms"] == f"{math.pi / 8:.4g}"
    assert first["angle"] == f"{math.pi / 3:.4g}"
    assert (first["ratio"], second["ratio"]) == ("2", "inf")
    assert (first["rule"], first["lambda"], first["update"]) == ("rskip", 2, 10)
    half = math.sqrt(0.5)
    weight = (half + 1) / math.hypot(1 + half, half)
    assert float(first["by_weights"]) == pytest.approx(-math.log(weight), rel=1e-3)
    returned = math.sqrt(1 + 0.1**2 + 2 * 0.1 * 0.5)
    assert float(first["predicted"]) == pytest.approx(1 / (weight * returned), rel=1e-3)


def test_without_a_gradient_there_is_a_ratio_and_no_prediction(run):
    """The log then has neither what the branch returns nor its cosine."""
    second = run.skip_log.read_text().splitlines()[1]
    kept = {k: v for k, v in json.loads(second).items() if "gradient" not in k}
    run.skip_log.write_text(json.dumps(kept) + "\n")
    (row,) = skip_weight.read_run(run)
    assert (row["ratio"], row["predicted"]) == ("inf", "nan")


@pytest.mark.parametrize("others", [[], ["auto"]])
def test_the_runs_that_the_idea_came_from_are_known_whatever_else_is_in_the_table(others):
    (rule, scale), *_ = skip_weight.LOOKED_AT
    rows = [{"rule": rule, "lambda": str(scale), "layers": 36, "lr": 0.003}]
    rows += [{"rule": "xskip", "lambda": each, "layers": 36, "lr": 0.003} for each in others]
    rows += [{"rule": "xskip", "lambda": "", "layers": 36, "lr": 0.003}]  # pre-norm
    text = io.StringIO(pandas.DataFrame(rows).to_csv(index=False))
    looked = skip_weight.was_looked_at(pandas.read_csv(text))
    assert looked.tolist() == [True] + [False] * (len(rows) - 1)


def test_a_logged_cosine_may_be_rounded_to_beyond_1():
    assert skip_weight.weight_by_constants(0.5, 1 + 1e-12) == pytest.approx(1 / 1.5)
    assert skip_weight.weight_by_constants(0.5, -1 - 1e-12) == pytest.approx(2)


def test_a_branch_that_returns_the_gradient_negated_loses_it_all(run):
    log = run.skip_log
    text = log.read_text().replace(
        '_over_skip_gradient/decoder.layers.1.final_skip": 0.1',
        '_over_skip_gradient/decoder.layers.1.final_skip": 1.0',
    )
    log.write_text(
        text.replace(
            'cos_gradients/decoder.layers.1.final_skip": 0.5',
            'cos_gradients/decoder.layers.1.final_skip": -1.0',
        )
    )
    first, _ = skip_weight.read_run(run)
    assert float(first["predicted"]) > 1e100


def test_a_sentence_is_counted_wrong_where_its_number_and_the_gradient_disagree(capsys):
    """Three runs of 6 layers, N = 18, made up: lost beyond every limit, kept within, lost within.

    The largest value of the updates from 50 on counts; DeepNorm, which has no λ, is a run, too.
    """
    table = pandas.DataFrame(
        [
            # rule, λ, update, angle, its estimate, ratio, predicted
            ("rskip", 1.0, 10, 1.0, 1.0, 1e9, 1e9),
            ("rskip", 1.0, 50, 1.0, 1.0, 29.0, 35.0),
            ("rskip", 1.0, 100, 0.9, 0.9, 30.0, 25.0),
            ("xskip", 8.0, 10, 1.0, 1.0, 1e9, 1e9),
            ("xskip", 8.0, 50, 0.1, 0.1, 2.0, 2.0),
            ("deepnorm", math.nan, 50, 0.4, 0.3, math.inf, 1e6),
        ],
        columns=["rule", "lambda", "update", "angle", "angle_from_norms", "ratio", "predicted"],
    ).assign(task="translation", c=math.nan, layers=6, lr=0.003, seed=1)
    table = table.assign(by_weights=1.0, by_weights_across=0.25)
    runs = skip_weight.largest_of_runs(table).set_index("rule")
    assert runs.lost.to_dict() == {"deepnorm": True, "rskip": True, "xskip": False}
    skip_weight.print_sentences(runs)
    printed = capsys.readouterr().out
    assert "3 runs, 2 of them lost" in printed
    # N = 18: DeepNorm's 0.3 is below 10 / 18 and above 1 / sqrt(18), 0.4 below 5.0 / 18^0.80
    assert [line.split()[-4:] for line in printed.splitlines()[-4:]] == [
        ["1", "0", "1", "1.000"],
        ["0", "0", "0", "1.000"],
        ["1", "0", "1", "1.000"],
        ["0", "0", "0", "1.000"],
    ]
    skip_weight.print_runs(runs.reset_index())
    assert capsys.readouterr().out.splitlines()[-1].split()[-1] == "0.75"
    skip_weight.print_closeness(table)
    # ln 29 and ln 30 are close to ln 35 and ln 25, ln 2 to ln 2; inf has no logarithm
    assert "close at 3 of 3 updates" in capsys.readouterr().out


def test_the_archived_logs_give_the_archived_table(tmp_path, monkeypatch, capsys):
    """results/skip_weight_logs.tar.xz has the logs of both tables, and of the page's answers."""
    unpack(ROOT / "results" / "skip_weight_logs.tar.xz", tmp_path)
    for folder, name in (("weight", "skip_weight"), ("lambda", "auto_lambda")):
        stem = tmp_path / name
        words = ["skip_weight.py", str(tmp_path / folder), "--output", str(stem)]
        monkeypatch.setattr(sys, "argv", words)
        skip_weight.main()
        table = (ROOT / "results" / f"{name}.csv").read_text("utf-8")
        assert stem.with_suffix(".csv").read_text("utf-8") == table
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "depth.md").read_text("utf-8")
    (line,) = [line for line in printed.splitlines() if line.startswith("language model: ")]
    count, of = line.split(" close at ")[1].split(" updates")[0].split(" of ")
    assert f"at {count} of {of} of the updates of the language models" in page
