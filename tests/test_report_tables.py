"""The tables of a report: numbers by hand, states, what is never shown, escapes, the same bytes twice."""

import re
import statistics
import sys

import pytest
from conftest import ROOT, run_command
from report_tree import SIGNATURE, Tree, image_settings, markdown_rows, translation_settings
from sacrebleu.metrics import BLEU
from scipy import stats
from test_report_statistics import systems

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked
from fairseq_rskip.tools.report.render import latex, markdown
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
    (tree.folder(plan, "2xSkip", 2) / "queued.json").write_text('{"job": "77"}')
    running = tree.folder(plan, "1xSkip+LN", 1)
    (running / "log.jsonl").write_text('{"iteration": 16000}\n')
    tree.finish(plan, "2rSkip+LN", {1: float("nan")})
    with locked(running, name=LOCK):
        folder = tree.report("--no-figures")
    rows = markdown_rows((folder / "report.md").read_text("utf-8"))
    assert rows["1xSkip"][1:3] == ["**6.25 ± 0.35**", "2 of 3"] or rows["1xSkip"][1:3] == ["6.25 ± 0.35", "2 of 3"]
    assert rows["2xSkip"][1] == "*seed 1 stopped 40 %; seed 2 queued: SLURM job 77; seed 3 not run*"
    assert rows["1xSkip+LN"][1] == "*seed 1 running 25 %; seeds 2, 3 not run*"
    assert rows["2rSkip+LN"][1] == "*seed 1 done, with error not finite; seeds 2, 3 not run*"
    text = (folder / "report.html").read_text("utf-8")
    assert "1xSkip: seed 2 failed: RuntimeError: a|b &lt;i&gt;out of memory." in text
    assert "nan" not in {cell.lower() for row in rows.values() for cell in row}


def test_a_scaled_run_never_stands_beside_the_papers_value(tree):
    tree.table()
    changes = {"scale": 0.0125, "changed": {"depth": 20}, "data": "imagefolder:/nowhere/cifar10-jpg"}
    settings = {
        (label, ""): {**image_settings(label, 20, 800), "data": changes["data"]} for label in ("1xSkip", "2xSkip")
    }
    plan = tree.plan(settings=settings, **changes)
    tree.finish(plan, "1xSkip", BASE)
    tree.finish(plan, "2xSkip", LN)
    folder = tree.report("--no-figures")
    sentence = "Not the paper's experiment: scale 0.0125, cifar10-jpg in place of cifar10, depth 20; the values are not"
    texts = {ending: (folder / f"report.{ending}").read_text("utf-8") for ending in ("md", "tex", "html")}
    for text in texts.values():
        assert sentence in text.replace("&#39;", "'")
        assert "ours − paper<" not in text
    assert all("paper (full scale, cifar10)" in texts[ending] for ending in ("md", "html"))
    assert "The paper's values: full scale, cifar10." in texts["tex"] and "& paper &" in texts["tex"]
    rows = markdown_rows(texts["md"])
    assert "ours − paper" not in rows["row"] and "0.0125 of the whole length" in texts["md"]
    assert tree.records()["1xSkip", ""]["ours_minus_paper"] == ""
    assert {record["papers_experiment"] for record in tree.records().values()} == {"False"}


def test_every_kind_of_change_is_named(tree):
    tree.table()
    for n, change in enumerate(
        ({"scale": 0.5}, {"changed": {"depth": 20}}, {"stand_in": {"width": 8}}, {"data": "digits"})
    ):
        settings = {("1xSkip", ""): {**image_settings("1xSkip"), "data": change.get("data", "cifar10")}}
        plan = tree.plan(settings=settings, **{"name": f"plan{n}", **change})
        tree.finish(plan, "1xSkip", BASE)
    text = (tree.report("--no-figures") / "report.md").read_text("utf-8")
    named = re.findall(r"Not the paper's experiment: (.*?);", text)
    assert named == ["scale 0.5", "depth 20", "width 8", "digits in place of cifar10"]


def test_outdated_cells_are_named_and_not_put_beside_the_papers(tree):
    tree.table()
    tree.finish(tree.plan(), "1xSkip", BASE)
    text = (tree.report("--no-figures", compare=True) / "report.md").read_text("utf-8")
    assert "Run with other settings than table1.yaml has now: 1xSkip, 2xSkip, 1xSkip+LN." in text
    assert "Not the paper's experiment; " in text and "ours − paper" not in markdown_rows(text)["row"]


def test_another_corpus_has_another_recipe(tree):
    tree.table("table2", "translation", rows=[{"label": "base"}])
    settings = {("base", ""): {**translation_settings("base", "multi30k-en-de"), "corpus": "multi30k-en-de"}}
    settings["base", ""]["average"] = 3
    tree.plan("table2", settings, data="multi30k-en-de")
    text = (tree.report("--no-figures") / "report.md").read_text("utf-8")
    # scripts/training/recipes.py: 4,096 tokens and Vaswani et al.'s values against those of a small corpus
    said = "the recipe of multi30k-en-de; the recipe of iwslt15-en-vi has tokens a step 4096 (not 2048), lr the"
    assert said in text and "warmup-updates 4000 (not 800)" in text and "average of the last 3 checkpoints" in text


def test_few_resamples_are_refused(tree, capsys):
    with pytest.raises(SystemExit):
        tree.report("--resamples", "99")
    assert re.fullmatch(r"error: .*--resamples: '99'.* >= 100.*\n", capsys.readouterr().err)


def test_translation(tree, tmp_path):
    tree.table("table2", "translation", rows=[{"label": "base", "reported": 30.3}, {"label": "ours", "reported": 31.4}])
    plan = tree.plan(
        "table2", settings={(name, ""): translation_settings(name) for name in ("base", "ours")}, seeds=[1, 2]
    )
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
    assert "about one-sided, 100 resamples" in text and "two-sided" not in text
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
    settings = {
        (label, column): image_settings(label, depth)
        for label in ("1xSkip", "2rSkip+LN")
        for column, depth in (("A", 20), ("B", 32))
    }
    plan = tree.plan("table6", settings=settings)
    tree.finish(plan, "1xSkip", BASE, "A")
    tree.finish(plan, "2rSkip+LN", LN, "B")
    folder = tree.report("--no-figures")
    text = (folder / "report.md").read_text("utf-8")
    assert [line for line in text.splitlines() if line.startswith("| **")] == [
        f"| **{name}** |" + " |" * 6 for name in "AB"
    ]
    assert re.search(r"\| quoted \|.*\*quoted\* \|.*\*\*5.00\*\*", text)
    assert tree.records()["2rSkip+LN", "B"]["test"] == "1xSkip: not run"
    assert ("quoted", "B") not in tree.records()
    assert f"run other --output '{tree.out}'" in text
    assert not (tree.report("other", "--no-figures") / "report.csv").exists()


NASTY = r"50% $x_1$ & {λ} #~^\ <b>|*`[a]` − ±"


def test_labels_are_escaped(tree):
    tree.table(rows=[{"label": NASTY, "reported": 6.0, "equation": "x_{t} & F"}], title=NASTY, note="<script>")
    plan = tree.plan(settings={(NASTY, ""): image_settings("1xSkip")})
    tree.finish(plan, NASTY, BASE)
    folder = tree.report("--no-figures")
    page = (folder / "report.html").read_text("utf-8")
    assert "<b>" not in page and "<script" not in page and "&lt;b&gt;|*`[a]`" in page
    tex = (folder / "report.tex").read_text("utf-8")
    check_latex(tex)
    assert r"50\% \$x\_1\$ \& \{$\lambda$\} \#\textasciitilde{}\textasciicircum{}\textbackslash{} $<$b$>$$|$" in tex
    row = next(line for line in tex.splitlines() if line.strip().startswith(r"50\%"))
    headers = next(line for line in tex.splitlines() if line.strip().startswith("row &"))
    assert len(re.findall(r"(?<!\\)&", row)) == len(re.findall(r"(?<!\\)&", headers)) and row.endswith(r"\\")
    text = (folder / "report.md").read_text("utf-8")
    line = next(line for line in text.splitlines() if line.startswith("| 50%"))
    header = next(line for line in text.splitlines() if line.startswith("| row"))
    assert len(re.findall(r"(?<!\\)\|", line)) == len(re.findall(r"(?<!\\)\|", header))
    assert latex("* [x]") == "{*} {[}x{]}" and markdown("a\n| b") == "a \\| b"


def check_latex(text):
    """Braces and environments balance, and no character is left that LaTeX would trip over."""
    code = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    depth = 0
    for sign in re.findall(r"(?<!\\)[{}]", code.replace(r"\\", "")):
        depth += 1 if sign == "{" else -1
        assert depth >= 0
    assert depth == 0 and len(re.findall(r"(?<!\\)\$", code)) % 2 == 0
    assert re.findall(r"\\begin{(\w+)}", code) and not re.search(
        r"(?<!\\)[#%~_]|[λ−±]", re.sub(r"\\label{.*?}", "", code)
    )
    stack = []
    for what, name in re.findall(r"\\(begin|end){(\w+)}", code):
        if what == "begin":
            stack.append(name)
        else:
            assert stack.pop() == name
    assert not stack


def test_two_reports_are_the_same_bytes(tree):
    tree.table()
    plan = tree.plan()
    tree.finish(plan, "1xSkip", BASE)
    first = {path.name: path.read_bytes() for path in tree.report("--no-figures").glob("report.*")}
    assert set(first) == {"report.md", "report.tex", "report.html", "report.csv"}
    second = {path.name: path.read_bytes() for path in tree.report("--no-figures").glob("report.*")}
    assert first == second


def test_errors(tree, capsys):
    tree.table()
    with pytest.raises(UserError, match="no table named 'table9'; there are table1"):
        tree.report("table9")
    plan = tree.plan()
    (tree.experiments / "table1.yaml").rename(tree.experiments / "table2.yaml")
    tree.report("--no-figures")
    assert f"warning: {plan.name} is left out" in capsys.readouterr().err
    (tree.out / "plans" / "table1.json").write_text("{")
    with pytest.raises(UserError, match="cannot read the plan"):
        tree.report()


@pytest.mark.slow
def test_command(tree):
    tree.table()
    tree.finish(tree.plan(), "1xSkip", BASE)
    words = ["report", "--output", tree.out, "--experiments", tree.experiments, "--no-figures", "--to", tree.out / "ü"]
    done = run_command([sys.executable, ROOT / "scripts" / "reproduce.py", *words])
    assert (done.returncode, done.stderr) == (0, "") and "6.20 ± 0.20" in (tree.out / "ü" / "report.md").read_text(
        "utf-8"
    )
    done = run_command(
        [sys.executable, ROOT / "scripts" / "reproduce.py", *words[:-1], tree.experiments / "table1.yaml"]
    )
    assert done.returncode == 1 and re.fullmatch(r"error: .*table1\.yaml.*\n", done.stderr)
