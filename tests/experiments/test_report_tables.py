"""The tables of a report: numbers by hand, states, what is never shown, the same bytes twice."""

import functools
import re
import signal
import statistics
import sys

import pytest
from conftest import ROOT, run_command
from report_tree import SIGNATURE, Tree, markdown_rows, settings, systems
from sacrebleu.metrics import BLEU
from scipy import stats

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked
from fairseq_rskip.tools.reproduce.main import main
from fairseq_rskip.tools.reproduce.runs import LOCK

BASE, LN = {1: 6.0, 2: 6.4, 3: 6.2}, {1: 7.1, 2: 7.5, 3: 7.0}


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_numbers(tree):
    tree.table()
    plan = tree.plan()
    tree.finish(plan, "1xSkip", BASE)
    tree.finish(plan, "1xSkip+LN", LN)
    text = (tree.report("--no-figures") / "report.md").read_text("utf-8")
    a, b = list(LN.values()), list(BASE.values())
    p = stats.ttest_ind(a, b, equal_var=False).pvalue
    mark = " \\*" if p < 0.05 else ""
    rows = markdown_rows(text)
    assert rows["row"][1:] == ["ours", "n", "paper", "ours − paper", "ours − 1xSkip", "p", "p, Holm"]
    mean, deviation = statistics.mean(a), statistics.stdev(a)
    assert rows["1xSkip+LN"] == [
        "eq 1xSkip+LN",
        f"{mean:.2f} ± {deviation:.2f}",
        "3",
        "8.00",
        f"{mean - 8:+.2f}".replace("-", "−"),
        f"{mean - 6.2:+.2f}",
        f"{p:.3f}",
        f"{p:.3f}{mark}",
    ]
    assert rows["1xSkip"][1:6] == ["**6.20 ± 0.20**", "3", "**6.00**", "+0.20", "baseline"]
    record = tree.records()["1xSkip+LN", ""]
    assert float(record["mean"]) == mean and float(record["standard_deviation"]) == deviation
    assert float(record["p"]) == p and float(record["ours_minus_paper"]) == mean - 8
    assert record["values_by_seed"] == "1:7.1 2:7.5 3:7.0"
    for said in ("fairseq\\_rskip 9.9, torch 2.14", "0123456789 with changes", "64,000 iterations", "3 (1, 2, 3)"):
        assert said in text
    assert "Not the paper's" not in text


def test_states(tree):
    tree.table()
    plan = tree.plan()
    tree.finish(plan, "1xSkip", {1: 6.0, 3: 6.5})
    tree.fail(plan, "1xSkip", 2, "RuntimeError: a|b <i>out\x1b[31m of memory")
    folder = tree.folder(plan, "2xSkip", 1)
    (folder / "log.jsonl").write_text('{"iteration": 25600}\n')
    (folder / "log.txt").write_text("")
    tree.record(tree.folder(plan, "2xSkip", 2), queued={"job": "77"})
    running = tree.folder(plan, "1xSkip+LN", 1)
    (running / "log.jsonl").write_text('{"iteration": 16000}\n')
    tree.finish(plan, "2rSkip+LN", {1: float("nan")})
    with locked(running, name=LOCK):
        folder = tree.report("--no-figures")
    rows = markdown_rows((folder / "report.md").read_text("utf-8"))
    assert rows["1xSkip"][1:3] == ["**6.25 ± 0.35**", "2 of 3"] or rows["1xSkip"][1:3] == ["6.25 ± 0.35", "2 of 3"]
    assert rows["2xSkip"][1] == "*stopped 40 %; queued; not run*"
    assert rows["1xSkip+LN"][1] == "*running 25 %; not run*"
    text = (folder / "report.html").read_text("utf-8")
    for said in (
        "1xSkip: seed 2 failed: RuntimeError: a|b &lt;i&gt;out of memory.",
        "2xSkip: seed 1 stopped 40 %; seed 2 queued: SLURM job 77; seed 3 not run.",
        "2rSkip+LN: seed 1 done, with error not finite; seeds 2, 3 not run.",
    ):
        assert said in text
    assert "nan" not in {cell.lower() for row in rows.values() for cell in row}


NOT_THE_PAPERS = {
    "scale": ({"scale": 0.5}, "scale 0.5"),
    "changed": ({"changed": {"depth": 20}}, "depth 20"),
    "stand_in": ({"stand_in": {"width": 8}}, "width 8"),
    "data": ({"data": "digits"}, "digits in place of cifar10"),
    "all": (
        {"scale": 0.0125, "changed": {"depth": 20}, "data": "cifar10-jpg"},
        "scale 0.0125, cifar10-jpg in place of cifar10, depth 20",
    ),
}


def test_the_header_counts_finished_and_failed_runs(tree):
    tree.table()
    plan = tree.plan(rows={"1xSkip": "1xSkip", "2xSkip": "2xSkip", "1xSkip+LN": "1xSkip"}, seeds=[1, 2])  # 4 runs
    for label in ("1xSkip", "2xSkip"):
        tree.fail(plan, label, 1, "no space left")
    header = "<p>.*1 table, 4 runs: 0 finished, 2 failed, 2 not run.</p>"
    assert re.search(header, (tree.report("--no-figures") / "report.html").read_text("utf-8"), re.DOTALL)
    tree.finish(plan, "1xSkip", {2: 6.0})
    text = (tree.report("--no-figures") / "report.html").read_text("utf-8")
    assert "4 runs: 1 finished, 2 failed, 1 not run.</p>" in text


def test_what_is_not_the_papers_experiment_is_named_and_never_stands_beside_its_values(tree):
    tree.table()
    for name, (change, _) in NOT_THE_PAPERS.items():
        make = functools.partial(settings, data=change.get("data"))
        tree.finish(tree.plan(rows=["1xSkip"], make=make, name=name, **change), "1xSkip", BASE)
    folder = tree.report("--no-figures")
    for ending in ("md", "tex", "html"):
        text = (folder / f"report.{ending}").read_text("utf-8").replace("&#39;", "'")
        named = re.findall(r"Not the paper's experiment: (.*?); the values are not", text)
        assert sorted(named) == sorted(said for _, said in NOT_THE_PAPERS.values())
        assert text.count("paper (full scale, cifar10)") == len(NOT_THE_PAPERS)
        assert not re.search("ours ([−]|\\$-\\$) paper ?[|&<]", text)
    assert "0.0125 of the whole length" in text
    record = tree.records()["1xSkip", ""]
    assert (record["ours_minus_paper"], record["papers_experiment"]) == ("", "False")


def test_outdated_cells_are_named_and_not_put_beside_the_papers(tree):
    tree.table()
    tree.finish(tree.plan(), "1xSkip", BASE)
    tree.table(options={"depth": 20})
    text = (tree.report("--no-figures") / "report.md").read_text("utf-8")
    assert "Run with other settings than table1.yaml has now: 1xSkip, 2xSkip, 1xSkip+LN, 2rSkip+LN." in text
    assert "Not the paper's experiment; " in text and "ours − paper" not in markdown_rows(text)["row"]


def test_another_corpus_has_another_recipe(tree):
    tree.table("table2", "translation", rows=[{"label": "base"}])
    make = functools.partial(settings, data="multi30k-en-de", average=3)
    tree.plan("table2", make=make, data="multi30k-en-de")
    text = (tree.report("--no-figures") / "report.md").read_text("utf-8")
    # the recipes: 4,096 tokens and Vaswani et al.'s values against those of a small corpus
    assert re.search("- recipe multi30k-en-de: tokens per step 2048, .*warmup-updates 800", text)
    assert re.search("- not the recipe iwslt15-en-vi: tokens per step 4096, .*warmup-updates 4000", text)
    assert "average of the last 3 checkpoints" in text


def test_few_resamples_are_refused(tree, capsys):
    with pytest.raises(SystemExit):
        tree.report("--resamples", "99")
    assert re.fullmatch(r"error: .*--resamples: '99' .* at least 100.*\n", capsys.readouterr().err)


def test_translation(tree, tmp_path):
    tree.table("table2", "translation", rows=[{"label": "base", "reported": 30.3}, {"label": "ours", "reported": 31.4}])
    plan = tree.plan("table2", seeds=[1, 2])
    for seed in (1, 2):
        reference, *made = systems(seed)
        path = tmp_path / f"test{seed}.vi"
        path.write_text("\n".join(reference) + "\n")
        for label, lines in zip(("base", "ours"), made):
            score = BLEU(tokenize="intl", force=True).corpus_score(lines, [reference]).score
            tree.translate(plan, label, seed, lines, path, score)
    folder = tree.report("--no-figures", "--resamples", "100")
    text = (folder / "report.md").read_text("utf-8")
    p = dict(part.split(":") for part in tree.records()["ours", ""]["p"].split())
    assert set(p) == {"1", "2"}
    told = [f"seed {seed}: {float(value):.3f}" for seed, value in p.items()]
    assert markdown_rows(text)["ours"][5] == ", ".join(told)
    assert "approximate randomisation, two-sided, 100 trials" in text and SIGNATURE.replace("|", "\\|") in text
    text = (tree.report("--no-figures", "--resamples", "100", "--test", "bootstrap") / "report.md").read_text("utf-8")
    assert "about one-sided, 100 resamples" in text and "randomisation, two-sided" not in text
    (tmp_path / "test2.vi").unlink()
    text = (tree.report("--no-figures", "--resamples", "100") / "report.md").read_text("utf-8")
    assert markdown_rows(text)["ours"][5] == told[0] and "ours: seed 2 not tested: references not readable." in text
    path.with_name("test1.vi").write_text("a\n")
    text = (tree.report("--no-figures") / "report.md").read_text("utf-8")
    assert markdown_rows(text)["ours"][5] == "*translations and references differ in length; references not readable*"


def test_columns_quotes_and_tables_without_a_plan(tree):
    rows = [
        {"label": "quoted", "run": False, "reported": {"A": 5.0}},
        {"label": "1xSkip", "reported": {"A": 6.0, "B": 7.0}},
        {"label": "2rSkip+LN", "reported": {"A": 5.5, "B": 6.5}},
    ]
    columns = {"A": {"options": {"depth": 20}}, "B": {"data": "cifar100"}}
    tree.table("table6", rows=rows, columns=columns, baseline="1xSkip")
    tree.table("other")
    plan = tree.plan("table6")
    tree.finish(plan, "1xSkip", BASE, "A")
    tree.finish(plan, "2rSkip+LN", LN, "B")
    folder = tree.report("--no-figures")
    text = (folder / "report.md").read_text("utf-8")
    assert re.search(r"\| A +\| quoted +\| +\*quoted\* \|.*\*\*5.00\*\*", text)
    assert re.search(r"\| B +\| 1xSkip +\|", text) and len(re.findall(r"\| A +\|", text)) == 1
    assert tree.records()["2rSkip+LN", "B"]["test"] == "1xSkip: not run"
    assert ("quoted", "B") not in tree.records()
    assert "Not run yet, A: 1 of 2 rows (2rSkip+LN)." in text and "B: 1 of 2 rows (1xSkip); the baseline" in text
    assert f"run other --output '{tree.out}'" in text
    assert "- other, Skip constructions, PreAct-ResNet (Liu et al. 2020, Table 1): not run\n" in text
    assert not (tree.report("other", "--no-figures") / "report.csv").exists()


def test_a_partial_study_shows_what_has_been_run_and_says_how_much_has_not(tree):
    rows = [{"label": f"rule {n}", "options": {"lr": n}} for n in range(1, 13)]
    columns = {f"{depth} layers": {"options": {"depth": depth}} for depth in (8, 14, 20)}
    tree.table("study", rows=rows, columns=columns)
    plan = tree.plan("study")
    folder = tree.report("--no-figures")
    assert len(re.findall(r"\*not run\*", (folder / "report.md").read_text("utf-8"))) == 36  # nothing else to show yet
    for number in range(1, 12):
        tree.finish(plan, f"rule {number}", {1: 5.0 + number, 3: 5.5}, "8 layers")
    tree.fail(plan, "rule 1", 2, "too hot", "8 layers")
    tree.finish(plan, "rule 2", {2: 7.0}, "14 layers")
    folder = tree.report("--no-figures")
    text = (folder / "report.md").read_text("utf-8")
    lines = [line for line in text.splitlines() if "| rule " in line]
    assert len(lines) == 12 and lines[0].startswith("| 14 layers") and "1 of 3" in lines[0] and "2 of 3" in lines[1]
    assert "Not run yet, 8 layers: 1 of 12 rows (rule 12).\n" in text
    assert "Not run yet, 14 layers: 11 of 12 rows; the baseline is one of them: nothing is compared.\n" in text
    assert "Not run yet, 20 layers: all 12 rows.\n" in text
    assert "\n10 of these rows: seed 2 not run.\n" in text and "\nrule 1 / 8 layers: seed 2 failed: too hot.\n" in text
    assert "- rule 11: lr 11" in text and "- rule 12" not in text
    assert "36 runs: 23 finished, 1 failed, 12 not run." in (folder / "report.html").read_text("utf-8")


def test_what_cannot_be_reported_writes_nothing(tree):
    tree.table()
    with pytest.raises(UserError, match="nothing has been run in .*; expected the --output of a run"):
        tree.report()
    assert not tree.out.exists()
    tree.plan()
    with pytest.raises(UserError, match="no table named 'table9'; there are table1"):
        tree.report("table9")
    (tree.out / "plans" / "table1.json").write_text("{")
    with pytest.raises(UserError, match="cannot read the plan"):
        tree.report()
    assert not (tree.out / "report").exists()


def test_a_sweep_is_reported(tree):
    rows = [{"label": label, "arch": "a"} for label in ("swept", "plain", "open")]
    tree.table(
        "sweep", "translation", rows=rows, metric="valid_loss", also=["chrF"], sweep={"lr": [1, 2, 3]}, baseline="plain"
    )
    plan = tree.plan("sweep", seeds=[1, 2], swept={"swept": [1, 2, 3], "open": [1, 2, 3]})
    for variant, values in enumerate(({1: 4.5}, {1: 4.25}, {1: 4.0, 2: 4.5})):
        tree.finish(plan, "swept", values, metric="valid_loss", variant=variant, chrF=10.0 * variant)
    tree.finish(plan, "plain", {1: 5.0, 2: 5.5}, metric="valid_loss", chrF=7.0)
    tree.finish(plan, "open", {1: 4.0}, metric="valid_loss", variant=1)
    text = (tree.report("--no-figures") / "report.md").read_text("utf-8")
    assert (
        "Sweep of swept, valid\\_loss: lr 1: 4.500, lr 2: 4.250, lr 3: 4.000; chosen lr 3, on the border of the" in text
    )
    assert "Sweep of open, valid\\_loss: lr 1: not run, lr 2: 4.000, lr 3: not run; not decided yet." in text
    assert "sweep: lr 1 / 2 / 3, each value with the first seed, chosen by valid\\_loss on the held-out set" in text
    rows = markdown_rows(text)
    assert rows["swept"][:4] == ["**4.250 ± 0.354**", "2", "20.00 ± 0.00", "lr 3"]
    assert rows["open"][0] == "*sweep: 1 of 3 values done*"
    p = stats.ttest_ind([4.0, 4.5], [5.0, 5.5], equal_var=False).pvalue
    assert rows["swept"][4:6] == ["−1.000", f"{p:.3f}"] and "Welch's t-test" in text  # a loss is of no single sentence
    assert tree.records()["swept", ""]["chosen"] == "lr 3"
    # n = 2, s.d. 0.354, degrees of freedom 2: 5.653 * 0.354
    assert "Power: 2 seeds a row find a difference of 2 in valid\\_loss four times of five" in text


@pytest.mark.slow
def test_command(tree, capsys):
    tree.table()
    tree.finish(tree.plan(), "1xSkip", BASE)
    words = ["report", "--output", tree.out, "--experiments", tree.experiments, "--no-figures", "--to"]
    done = run_command([sys.executable, ROOT / "scripts" / "reproduce.py", *words, tree.out / "ü"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "6.20 ± 0.20" in (tree.out / "ü" / "report.md").read_text("utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", lambda *_: None)
        assert main([*map(str, words), str(tree.experiments / "table1.yaml")]) == 1
    assert re.fullmatch(r"error: .*table1\.yaml.*\n", capsys.readouterr().err)
