"""A report of tables of one's own: titles, options, recipes, labels of any characters."""

import dataclasses
import re

import pytest
from report_tree import Tree, settings

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.report.main import write_report
from fairseq_rskip.tools.report.page import latex, markdown
from fairseq_rskip.tools.reproduce.loading import load
from fairseq_rskip.tools.reproduce.options import parse


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_an_own_corpus_has_what_the_options_leave_of_its_recipe(tree, tmp_path):
    def made(label, task, **more):
        return dataclasses.replace(settings(label, task), data=str(tmp_path), options=more)

    def recipe(*both):
        options = dict(zip("ab", both))
        tree.table(task="translation", rows=[{"label": label} for label in options], data=str(tmp_path))
        tree.plan(make=lambda label, task: made(label, task, **options[label]))
        text = (tree.report("--no-figures") / "report.md").read_text("utf-8")
        return re.search("- recipe medium: (.*)", text)[1]

    whole = recipe({}, {"max-epoch": 3, "max-tokens": 400})  # one row has all of it
    assert whole.startswith("tokens per step 4096, optimizer adam") and "seed" not in whole
    assert "max-update 100000" in whole and "warmup-updates 4000" in whole
    rest = recipe({"max-epoch": 3, "batch-size": 8, "warmup-updates": 9}, {"max-epoch": 3, "max-tokens": 400})
    assert rest == whole.partition(", ")[2].replace(", max-update 100000", "")


NASTY = r"50% $x_1$ & {λ} #~^\ <b>|*`[a]` − ±"


def test_labels_are_escaped(tree):
    tree.table(rows=[{"label": NASTY, "reported": 6.0, "equation": "x_{t} & F"}], title=NASTY, note="<script>")
    plan = tree.plan()
    tree.finish(plan, NASTY, {1: 6.0, 2: 6.4, 3: 6.2})
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


OWN = [{"label": "mine", "options": {"depth": 14}}, {"label": "other"}]


def own_table(tree, name="mine", **more):
    """A table as a user would write it: no source, no values of a paper."""
    tree.table(name, rows=OWN, title="My own skips", options={"batch-size": 64, "warmup-iterations": 7}, **more)
    path = tree.experiments / f"{name}.yaml"
    path.write_text(re.sub("source:.*\n", "", path.read_text("utf-8")), "utf-8")
    tree.tables[name] = load(path)
    plan = tree.plan(name, seeds=[1, 2])
    tree.finish(plan, "mine", {1: 5.0, 2: 5.5})
    return plan


def test_a_table_of_ones_own_has_its_title_and_options_and_a_plan_remembers_it(tree, capsys):
    plan = own_table(tree)
    write_report(parse(["report", "--output", str(tree.out), "--no-figures"]))  # without --experiments
    report = tree.out / "report" / "report.md"
    for path in report.parent.glob("report.[mth]*"):
        text = path.read_text("utf-8")
        assert "batch-size 64, warmup-iterations 7" in text and "depth 14" in text and "paper's tables" not in text
        assert path.suffix != ".md" or (text.startswith("# My own skips\n") and "1xSkip" not in text)
        assert path.suffix != ".html" or "<h1>My own skips</h1>" in text
    assert capsys.readouterr().err == ""
    path = tree.experiments / "mine.yaml"
    path.write_text("title: [half", "utf-8")
    tree.table("table1")
    tree.report("--no-figures")  # the table as it was, and others as they are
    text = report.read_text("utf-8")
    assert f"warning: {plan.name} is shown as it was run: {path}" in capsys.readouterr().err
    assert "My own skips" in text and "run table1 --output" in text
    path.unlink()
    tree.report("--no-figures")
    assert capsys.readouterr().err == "" and "5.25 ± 0.35" in report.read_text("utf-8")


def test_two_tables_of_one_name_are_not_mixed(tree, tmp_path):
    own_table(tree)
    other = Tree(tmp_path / "other")
    other.out = tree.out
    with pytest.raises(UserError, match="has runs of a table mine from .*; rename one, or choose another --output"):
        own_table(other)
