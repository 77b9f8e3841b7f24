"""README's figures, and the table of short trainings, are those of the CSVs in results/.

README stays short enough to be read.
"""

import csv
import json
import re

import pytest
from conftest import ROOT

from fairseq_rskip.tools.report.reading import read_rows
from fairseq_rskip.tools.significance import SeedModel

README = (ROOT / "README.md").read_text("utf-8")
FINDINGS = (ROOT / "docs" / "findings.md").read_text("utf-8")
RULES = (ROOT / "docs" / "rules.md").read_text("utf-8")
SEEDS = {"2": "two", "3": "three", "5": "five"}

# the beginning of a line of the table of short trainings -> its CSVs and their column
LINES = {
    "ResNet-20": (["skips_cifar"], ""),
    "translation, 2+2 layers": (["rivals"], ""),
    "language model, 6 layers": (["lm_rivals"], ""),
    "translation, 18+18 layers": (["deep", "depth_runs"], "18 layers"),  # the second swept further
}


def rows_of(names, column):
    """Return row -> its line in the reports ``names`` of results/.

    A later report's finished rows count.
    """
    rows = {}
    for name in names:
        with (ROOT / f"results/{name}.csv").open(encoding="utf-8") as file:
            for line in csv.DictReader(file):
                if line["column"] == column and (line["mean"] or line["row"] not in rows):
                    rows[line["row"]] = line
    return rows


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def table_of_results():
    """The short trainings: the header's cells, and the cells of each line."""
    section = FINDINGS.split("## Short trainings")[1].split("## How to read")[0]
    lines = section.splitlines()
    header, _, *body = [cells(line) for line in lines if line.startswith("|")]
    return header, body


@pytest.mark.parametrize("start", LINES)
def test_a_short_training_has_the_mean_and_deviation_of_its_csv(start):
    header, body = table_of_results()
    (line,) = [line for line in body if line[0].startswith(start)]
    measured = rows_of(*LINES[start])
    checked = 0
    for title, shown in zip(header[2:], line[2:]):
        named = re.search(r"\((\w+(\+LN)?)\)", title)
        row = named[1] if named else title
        if not shown:
            continue
        mean, deviation = float(measured[row]["mean"]), float(measured[row]["standard_deviation"])
        digits = 2 if start == "ResNet-20" else 3
        assert shown == f"{mean:.{digits}f} ± {deviation:.{digits}f}", row
        seeds = measured[row]["seeds_done"]
        assert seeds in re.findall(r"\d", line[1]), row
        checked += 1
    assert checked >= 4


@pytest.mark.parametrize("study", ["rivals", "skips", "lm_rivals"])
def test_at_the_lowest_rate_post_norm_is_ahead_of_2rskip(study):
    rows = rows_of([study], "")
    lowest = []
    for row in ("1xSkip+LN", "2rSkip+LN"):
        first, *_ = json.loads(rows[row]["swept"])
        lowest.append(first["result"])
    assert lowest[0] < lowest[1]


def test_language_models_ahead_of_pre_norm_by_the_model_and_by_their_own_pairs():
    page = (ROOT / "docs/studies/lm-rivals.md").read_text("utf-8")
    lines = read_rows(ROOT / "results/lm_rivals.csv")
    values = {row: line.values for row, line in lines.items() if line.values}
    model = SeedModel(values)
    ahead, open_alone = [], []
    for row in values.keys() - {"pre-norm"}:
        difference = model.difference(row, "pre-norm")
        if difference is None or difference.side != -1:
            continue
        ahead.append(row)
        pair = SeedModel({name: values[name] for name in (row, "pre-norm")})
        if pair.difference(row, "pre-norm").side != -1:
            open_alone.append(row)
    assert f"{len(ahead)} rows start ahead of pre-norm" in page
    assert f"{len(ahead) - len(open_alone)} of them by their own three pairs" in page
    assert sorted(open_alone) == ["CompleteP", "SpanNorm", "mHC", "nGPT, residual"]


def test_the_longer_training_has_the_figures_of_its_csv():
    with (ROOT / "results/gpu/multi30k_rows.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    table = README.split("## Results")[1].split("\n\n")[2]
    shown = [cells(line) for line in table.splitlines()[2:]]
    start, end, score = "validation loss near update 300", "best validation loss", "sacreBLEU 13a"
    assert len(shown) == len(rows) == 8
    for (name, *values), row in zip(shown, rows):
        assert name == row["row"].partition("@")[0]
        columns = [start, end, f"{end}, deviation", "difference", "low", "high"]
        columns += [score, f"{score}, deviation"]
        numbers = re.findall(r"-?\d+\.\d+", " ".join(values).replace("−", "-"))
        expected = [row[column] for column in columns if row[column]]
        assert len(numbers) == len(expected)
        for number, value in zip(numbers, expected):
            # the CSV has four digits, so a half may be rounded twice
            assert abs(float(number) - float(value)) <= 0.501 * 10 ** -len(number.split(".")[1])
    starts, ends = ([float(row[name]) for row in rows] for name in (start, end))
    without = [each for each, row in zip(starts, rows) if not row["row"].startswith("post-norm")]
    assert f"{max(starts) - min(starts):.2f} bits lie between the rules" in README
    assert f"({max(without) - min(without):.2f} without post-norm" in README
    assert f"at the end {max(ends) - min(ends):.2f}." in README


def test_the_speed_on_a_gpu_is_that_of_its_csv():
    with (ROOT / "results/gpu/transformer_fp16.csv").open(encoding="utf-8") as file:
        speeds = {row["model"]: row["training_over_stock"] for row in csv.DictReader(file)}
    share = f"{float(speeds['RSKIP_OPS=torch rskip_ln:2']):.2f}"
    assert f"Transformer-Base with 2rSkip+LN trains at {share} of stock's speed" in README


def test_the_pairs_have_the_figures_of_their_csvs():
    def pairs(name):
        with (ROOT / "results/gpu" / name).open(encoding="utf-8") as file:
            return {line["value"]: line for line in csv.DictReader(file)}

    bleu = pairs("multi30k_own_rates.csv")["sacreBLEU 13a"]
    mean, low, high = (f"{float(bleu[name]):.2f}" for name in ("mean", "low", "high"))
    assert f"in BLEU neither ({mean}, {low} to {high})".replace("-", "−") in README
    one_rate = pairs("multi30k_pair.csv")["best validation loss"]
    assert f"leads by {-float(one_rate['mean']):.3f} bits" in README
    assert f"({SEEDS[one_rate['seeds']]} seeds)" in README


def test_the_rules_in_readme_have_the_parameters_and_the_start_of_the_catalogue():
    catalogue = {}
    for line in RULES.splitlines():
        if line.startswith("| `") and len(cells(line)) == 9:
            architectures, _, _, _, _, parameters, start, *_ = cells(line)
            names = re.findall(r"`(\w+)`", architectures)
            counts = parameters.split(" / ")
            for name, count in zip(names, counts if len(counts) == len(names) else counts * 9):
                catalogue[name] = (count, start)
    table = README.split("## Skip connections")[1].split("[All rules]")[0]
    rows = [
        cells(line) for line in table.splitlines() if line.startswith("| `") and "--" not in line
    ]
    assert len(rows) >= 9
    for name, _, _, _, parameters, start in rows:
        assert (parameters, start) == catalogue[name.strip("`")], name


def test_the_example_runs_as_it_stands():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert len(names["skips"]) == 6 and names["x"].shape == (10, 8, 64)


def test_readme_has_at_most_10000_bytes():
    assert len(README.encode()) <= 10_000
