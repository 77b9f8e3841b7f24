"""The figures of a report: drawn from the finished runs, once, and what is said when that fails."""

import csv
import shlex
import sys

import pytest
from PIL import Image
from report_tree import Tree

from fairseq_rskip.analysis import figures
from fairseq_rskip.tools.report import figures as report_figures

BASE, LN = {1: 6.0, 2: 6.4, 3: 6.2}, {1: 7.1, 2: 7.5, 3: 7.0}
# in place of analyze.py: writes its arguments as the CSV file, and counts its calls
STAND_IN = """
import pathlib, sys
name, words = sys.argv[1], sys.argv[2:]
stem = pathlib.Path(words[words.index("--output") + 1])
with open(stem.parent / "calls", "a") as file:
    file.write(name + "\\n")
for ending in (".png", ".pdf", ".csv"):
    stem.with_name(stem.name + ending).write_text("\\n".join(words))
"""
FAILING = "import sys; print('warning: old'); sys.exit('error: no 100% <layer> here')"


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


@pytest.fixture
def slow_script(tmp_path, monkeypatch):
    path = tmp_path / "stand in.py"
    path.write_text(STAND_IN)
    monkeypatch.setattr(report_figures, "ANALYZE", [sys.executable, str(path)])
    return path


@pytest.fixture
def script(slow_script, monkeypatch):
    """The stand-in, and no drawing of the tables' own figures."""
    monkeypatch.setattr(figures, "save", lambda _, stem: stem.with_name(stem.name + ".png").write_bytes(b"png"))
    return slow_script


def read_csv(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_tables_figure_has_the_papers_values_only_where_they_may_stand_and_says_what_it_is_of(
    tree, slow_script, monkeypatch
):
    drawn, save = {}, figures.save
    monkeypatch.setattr(figures, "save", lambda figure, stem: save(drawn.setdefault(stem.name, figure), stem))
    tree.table()
    for name, more in (("whole", {}), ("part", {"scale": 0.5, "changed": {"depth": 20}})):
        plan = tree.plan(name=name, **more)
        tree.finish(plan, "1xSkip", BASE)
        tree.finish(plan, "2xSkip", {2: 7.5})
    folder = tree.report() / "figures"
    whole, part = (read_csv(folder / f"{name}.csv") for name in ("whole", "part"))
    assert [row["row"] for row in part] == ["1xSkip", "2xSkip"] and part[0]["paper"] == ""
    assert [row["paper"] for row in whole] == ["6.0", "7.0", "8.0", "9.0"]
    assert float(part[0]["mean"]) == pytest.approx(6.2) and part[0]["values_by_seed"] == "1:6.0 2:6.4 3:6.2"
    told = {name: part[0][name] for name in ("papers_experiment", "data", "scale", "length")}
    assert list(told.values()) == ["False", "cifar10", "0.5", "64,000 iterations"]
    assert whole[0]["papers_experiment"] == "True" and drawn["whole"].get_suptitle() == ""
    said = " ".join(drawn["part"].get_suptitle().split())
    assert said.startswith("Not the paper's experiment: scale 0.5, depth 20; the values are not comparable")
    texts = [text.get_text() for text in drawn["part"].legends[0].get_texts()]
    assert sorted(texts) == ["ours, mean \u00b1 s.d.", "ours, one seed"]
    for name in ("whole", "part"):
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        with Image.open(folder / f"{name}.png") as image:
            assert image.width > 400 and len(image.convert("L").getcolors()) > 10


def test_analyses_see_the_finished_runs(tree, script):
    tree.table("figure3", figure="gradients", figure_options={"examples": 10000})
    labels = {"1xSkip": "1xSkip", "2xSkip": "1xSkip", "1xSkip+LN": "1xSkip+LN", "2rSkip+LN": "2rSkip+LN"}
    plan = tree.plan("figure3", labels, scale=0.5)
    tree.finish(plan, "1xSkip", BASE)  # and of 2xSkip, which is the same here
    tree.finish(plan, "2rSkip+LN", {2: 7.0})
    folder = tree.report("--examples", "7")
    base, ln = (tree.folder(plan, label, 1).parent for label in ("1xSkip", "2rSkip+LN"))
    gradients = (folder / "figures" / "figure3-gradients.csv").read_text().split("\n")
    assert gradients[2:] == ["--examples", "7", f"1xSkip={base}/seed1", f"2rSkip+LN={ln}/seed2"]
    curves = (folder / "figures" / "figure3-curves.csv").read_text().split("\n")
    assert curves[2:] == [*(f"1xSkip={base}/seed{seed}" for seed in (1, 2, 3)), f"2rSkip+LN={ln}/seed2"]
    page = (folder / "report.html").read_text()
    assert page.count("<figure>") == 3 == page.count("Not the paper&#39;s experiment.\n<a")


def test_what_reads_logs_sees_every_seed(tree, script):
    tree.table(figure="course", figure_options={"by-block": True})
    plan = tree.plan()
    tree.finish(plan, "1xSkip", BASE)
    folder, runs = tree.report() / "figures", tree.folder(plan, "1xSkip", 1).parent
    drawn = (folder / "table1-course.csv").read_text().split("\n")
    assert drawn[2:] == ["--by-block", *(f"1xSkip={runs}/seed{seed}" for seed in (1, 2, 3))]


def test_an_analysis_is_made_again_only_for_other_runs_or_options(tree, script):
    tree.table(figure="ratio", figure_options={"examples": 10})
    plan = tree.plan()
    tree.finish(plan, "1xSkip", BASE)
    calls = tree.report() / "figures" / "calls"
    assert calls.read_text().split() == ["ratio", "curves"]
    tree.report()
    assert calls.read_text().split() == ["ratio", "curves"]
    tree.report("--examples", "20")
    assert calls.read_text().split() == ["ratio", "curves", "ratio"]
    tree.finish(plan, "1xSkip+LN", LN)
    tree.report("--examples", "20")
    assert calls.read_text().split() == ["ratio", "curves", "ratio", "ratio", "curves"]
    (calls.parent / "table1-curves.pdf").unlink()
    tree.report("--examples", "20")
    assert calls.read_text().split()[5:] == ["curves"]


def test_a_failing_analysis_is_said_and_stops_nothing(tree, script):
    tree.table()
    tree.finish(tree.plan(), "1xSkip", BASE)
    tree.report()
    script.write_text(FAILING)
    tree.report()
    (tree.out / "report" / "figures" / "table1-curves.png.key").unlink()
    folder = tree.report()
    text = (folder / "report.md").read_text("utf-8")
    assert "Learning curves could not be drawn: no 100% &lt;layer> here" in text
    command = next(line for line in text.splitlines() if line.startswith("    ") and "curves" in line)
    assert shlex.split(command)[:3] == [sys.executable, str(script), "curves"]
    assert "table1-curves.png" not in text and "figures/table1.png" in text
    assert "no 100% &lt;layer&gt; here" in (folder / "report.html").read_text("utf-8")


def test_weights_of_a_translation(tree, script):
    tree.table("table2", "translation", rows=[{"label": "a=b"}], figure="gradients")
    plan = tree.plan("table2", seeds=[1])
    folder = tree.folder(plan, "a=b", 1)
    tree.translate(plan, "a=b", 1, ["x"], folder / "gone", 1.0)
    (folder / "checkpoints").mkdir()
    written = tree.out / "report" / "figures" / "table2-gradients.csv"
    for name in ("checkpoints/checkpoint_last.pt", "checkpoints/checkpoint_best.pt", "evaluation/averaged.pt"):
        (folder / name).touch()
        written.with_suffix(".png.key").unlink(missing_ok=True)
        tree.report()
        assert written.read_text().split("\n")[-1] == f"a:b={folder / name}"
    assert written.with_name("table2-curves.csv").read_text().split("\n")[-1] == f"a:b={folder}/checkpoints"


def test_figures_of_the_users(tree, script):
    tree.table()
    (tree.out / "figures").mkdir(parents=True)
    Image.new("RGB", (3, 2)).save(tree.out / "figures" / "dépth 1.png")
    folder = tree.report()
    assert "](../figures/d%C3%A9pth%201.png)" in (folder / "report.md").read_text("utf-8")
    page = (folder / "report.html").read_text("utf-8")
    assert page.count("<img") == 1 and "figures/dépth 1.png" in page and "text/csv" not in page
    (tree.out / "figures" / "dépth 1.csv").write_text("a\n1\n")
    assert 'href="data:text/csv;base64,YQoxCg=="' in (tree.report() / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_real_curves_and_the_same_bytes_twice(tree):
    tree.table()
    tree.finish(tree.plan(), "1xSkip", BASE)
    folder = tree.report()
    names = [f"table1{part}{ending}" for part in ("", "-curves") for ending in (".csv", ".pdf", ".png")]
    files = [*(folder / "figures" / name for name in names), *folder.glob("report.*")]
    first = [path.read_bytes() for path in files]
    assert read_csv(folder / "figures" / "table1-curves.csv")[0]["run"] == "1xSkip"
    for path in files:
        path.unlink()
    tree.report()
    assert [path.read_bytes() for path in files] == first
