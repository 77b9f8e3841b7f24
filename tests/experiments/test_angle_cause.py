"""experiments/angle_cause.py: which comes first, from runs that are written down here."""

import importlib.util
import json
import math

import pandas
import pytest
from conftest import ROOT

from fairseq_rskip.analysis import skip_log
from fairseq_rskip.tools.experiments.finished import finished_runs

spec = importlib.util.spec_from_file_location("angle_cause", ROOT / "experiments/angle_cause.py")
angle_cause = importlib.util.module_from_spec(spec)
spec.loader.exec_module(angle_cause)


def run(angles, ratios):
    updates = range(1, len(angles) + 1)
    return pandas.DataFrame({"update": updates, "rms_angle": angles, "ratio": ratios})


def test_an_angle_that_passes_the_edge_before_the_gradient_is_lost():
    actual = angle_cause.answer(run([0.1, 0.3, 0.1, 0.3, 0.4], [1, 2, 3, 40, 90]), edge=0.2)
    assert actual["angle beyond the edge from"] == 2 and actual["ratio above 30 from"] == 4
    assert actual["most updates in a row beyond it"] == 2
    assert actual["angle when lost, or at the end"] == 0.3
    assert actual["largest angle"] == 0.4 and actual["largest ratio"] == 90


def test_a_run_that_keeps_its_gradient():
    actual = angle_cause.answer(run([0.1, 0.15], [1, 29]), edge=0.2)
    assert actual["angle beyond the edge from"] is None and actual["ratio above 30 from"] is None
    assert actual["angle when lost, or at the end"] == 0.15


def test_the_edge_is_extrapolated_by_the_measured_power_law(tmp_path, monkeypatch):
    residuals = [9, 18, 36]
    about = {"task": "translation", "lr": 0.003, "width": 64}
    rows = [{**about, "residuals": n, "edge": 3 * n**-0.8} for n in residuals]
    for other in ({"task": "language model"}, {"lr": 0.006}, {"width": 256}):
        rows.append({**about, **other, "residuals": 9, "edge": 1.0})
    file = tmp_path / "edges.csv"
    pandas.DataFrame(rows).to_csv(file, index=False)
    monkeypatch.setattr(angle_cause, "EDGES", file)
    assert angle_cause.edge_at(108, 0.003) == pytest.approx(3 * 108**-0.8)


def test_the_archived_runs_give_the_table_of_the_page():
    """docs/depth-history.md, "which comes first": λ = 2 to 5 at 36+36 layers and rate 0.003."""
    table = pandas.read_csv(ROOT / "results" / "angle_cause.csv")
    table = table[(table["rule"] == "rskip") & (table["lr"] == 0.003)]
    edge = angle_cause.edge_at(108, 0.003)
    assert round(edge, 3) == 0.118
    actual = {}
    for scale, run in table.groupby("lambda"):
        answer = angle_cause.answer(run, edge)
        angles = (round(answer[name], 3) for name in ("angle at first", "largest angle"))
        crossed = (answer["angle beyond the edge from"], answer["ratio above 30 from"])
        actual[scale] = (*angles, *crossed, round(answer["largest ratio from update 50 on"], 1))
    assert actual == {
        2: (0.258, 0.262, 1, 8, 18330000.0),
        3: (0.11, 0.151, 4, 15, 3667.0),
        4: (0.055, 0.084, None, 24, 17.3),
        5: (0.038, 0.060, None, None, 9.6),
    }


def test_the_angle_of_an_update_is_the_root_mean_square_over_the_decoder(tmp_path):
    """Of 0.3 and 0.4: sqrt(0.125); the encoder's right angle does not count."""
    options = {"decoder-layers": 1, "lr": 0.003, "skip-lambda": 2}
    settings = {"arch": "transformer_rskip_ln", "options": options}
    record = {"settings": settings, "seed": 1, "metrics": {"values": {"valid_loss": 5.0}}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    bottom, top = "decoder.layers.0.self_attn_skip", "decoder.layers.0.final_skip"
    values = {f"skip_cos_y_x/{bottom}": math.cos(0.3), f"skip_cos_y_x/{top}": math.cos(0.4)}
    values["skip_cos_y_x/encoder.layers.0.final_skip"] = 0.0
    values |= {f"skip_grad_norm/{top}": 6.0, f"skip_grad_norm/{bottom}": 2.0}
    skip_log.SkipLines(tmp_path, first=1).write(10, values)
    (run,) = finished_runs(tmp_path)
    (row,) = angle_cause.read_run(run)
    assert (row["rms_angle"], row["ratio"]) == ("0.3536", "3")
