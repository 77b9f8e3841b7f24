"""experiments/*.yaml: the shipped tables beside the paper's numbers, typed here once more, and what a table may say."""

import re
import shlex

import pytest
from conftest import ROOT
from reproduce_helpers import error_line, reproduce, write_table

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.reproduce import loading, plans, tables
from fairseq_rskip.tools.reproduce.main import make_plan
from fairseq_rskip.tools.reproduce.options import parse as parse_words
from fairseq_rskip.vision.config import parse

DEPTHS = ("ResNet-20", "ResNet-32", "ResNet-44", "ResNet-56", "ResNet-110")

BASELINE, PROPOSAL = (33.38, 32.00, 30.50, 29.81, 28.71), (32.99, 31.39, 29.85, 28.98, 27.69)

# Liu et al. 2020: Tables 1 to 7, and wSkip's of section 4.3
PAPER = {
    "table1": {
        **{"1xSkip": 6.31, "2xSkip": 8.41, "3xSkip": 9.23},
        **{"1xSkip+LN": 7.72, "2xSkip+LN": 6.29, "3xSkip+LN": 6.07},
        **{"1rSkip+LN": 7.72, "2rSkip+LN": 6.02, "3rSkip+LN": 6.55},
    },
    "table2": {
        **{"1xSkip": 28.98, "1xSkip+LN": 30.31, "2xSkip+LN": 30.99, "3xSkip+LN": 30.92},
        **{"1rSkip+LN": 30.31, "2rSkip+LN": 31.45, "3rSkip+LN": 31.10},
    },
    "table3": {"x + F": 6.31, "0.5x + F": 18.61, "LN(0.5x + F)": 29.88, "LN(x + 2F)": 24.98, "LN(x + 3F)": 61.02},
    "table4": {
        **{"1xSkip": 6.31, "1xSkip+BN": 8.23, "2xSkip+BN": 6.43, "3xSkip+BN": 6.50},
        **{"1rSkip+BN": 8.23, "2rSkip+BN": 6.77, "3rSkip+BN": 6.68},
    },
    "table5": {
        "1xSkip+LN": {"6 blocks": 30.31, "2 blocks": 30.04},
        "2rSkip+LN": {"6 blocks": 31.45, "2 blocks": 30.49},
    },
    "table6": {"Baseline": dict(zip(DEPTHS, BASELINE)), "+ proposal": dict(zip(DEPTHS, PROPOSAL))},
    "table7": {
        "Transformer-Base": {"EN-VI": 30.3, "EN-DE": 27.9, "EN-FR": 38.2},
        "Transformer-Base + proposal": {"EN-VI": 31.5, "EN-DE": 28.6, "EN-FR": 39.0},
        "Transformer-Big": {"EN-VI": 31.4, "EN-DE": 28.5, "EN-FR": 41.0},
        "Transformer-Big + proposal": {"EN-VI": 32.2, "EN-DE": 29.0, "EN-FR": 41.6},
    },
    "wskip": {"2rSkip+LN": 6.02, "wSkip+LN, w from 1": 8.66, "wSkip+LN, w from 2": 6.45},
}

QUOTED = {  # Table 7's rows of others
    "Vaswani": {"EN-DE": 28.4, "EN-FR": 41.0},
    "Dou": {"EN-DE": 29.2},
    "So": {"EN-DE": 29.8, "EN-FR": 41.3},
    "Zhang": {"EN-DE": 29.3},
    "Xu": {"EN-VI": 31.4, "EN-DE": 28.5},
    "Nguyen": {"EN-VI": 32.8, "EN-DE": 27.6},
    "Liu": {"EN-DE": 29.0, "EN-FR": 43.8},
    "Zhao": {"EN-VI": 31.3, "EN-DE": 29.9, "EN-FR": 43.5},
}


@pytest.fixture(scope="module")
def shipped():
    """The paper's, and not studies of the project's own."""
    known = loading.load_all(loading.FOLDER, pytest.fail)
    return {name: table for name, table in known.items() if table.source}


def test_every_reported_value_is_the_papers(shipped):
    assert {name for name in shipped if not name.startswith("figure")} == set(PAPER)
    for name, rows in PAPER.items():
        assert {row.label: row.reported for row in shipped[name].rows if row.run} == rows, name
    others = {row.label.split()[0]: row.reported for row in shipped["table7"].rows if not row.run}
    assert others == QUOTED


def test_images_have_five_seeds_as_the_paper_and_its_data(shipped):
    for name in ("table1", "table3", "table4", "table6", "wskip"):
        assert shipped[name].seeds == [1, 2, 3, 4, 5]
        assert shipped[name].data == ("cifar100" if name == "table6" else "cifar10")
    for name in ("table2", "table5", "table7"):
        assert shipped[name].data == "iwslt15-en-vi"
        assert shipped[name].metric == "sacreBLEU intl"  # which t2t-bleu computes


def test_a_label_says_what_the_cell_runs(shipped):
    """2xSkip+BN is xskip, lambda 2, batch norm; and so on."""
    norms = {"": "none", "+LN": "layer", "+BN": "batch"}
    count = 0
    for table in shipped.values():
        for cell in tables.cells(table):
            label = re.fullmatch(r"([\d.]+)([xr])Skip(|\+LN|\+BN)", cell.row)
            if not label:
                continue
            count += 1
            scale, kind, norm = float(label[1]), label[2], label[3]
            assert cell.options["skip-lambda"] == scale
            if table.task == "images":
                assert cell.options["skip-kind"] == ("xskip" if scale == 1 else f"{kind}skip")
                assert cell.options["skip-norm"] == norms[norm]
            else:
                kind = "x" if scale == 1 else kind
                assert cell.arch == f"transformer_{kind}skip{norm.lower().replace('+', '_')}_iwslt_en_vi"
    assert count > 30


def test_every_row_of_the_documentation_is_in_a_table(shipped):
    known = {}
    for table in shipped.values():
        made = make_plan(table, parse_words(["run", table.name]))  # which every cell must allow
        for cell in made.cells if table.task == "images" else ():
            (command,) = plans.make_run(made, cell.variants[0], 1, ROOT).commands()
            if cell.reported is not None:
                known[tuple(sorted(map(str, parse(command[2:], "").fixed().items())))] = cell.reported
    text = (ROOT / "docs" / "cifar.md").read_text("utf-8")
    rows = re.findall(r"^\| .* \| (?:Table \d|section 4\.3) \| ([\d.]+)[^|]* \| `(.*)` \|$", text, re.MULTILINE)
    assert len(rows) == 21
    for error, options in rows:
        assert known[tuple(sorted(map(str, parse(shlex.split(options), "").fixed().items())))] == float(error)


def test_a_rows_option_wins_over_its_columns_and_a_columns_over_the_tables(tmp_path):
    columns = {"a": {"options": {"depth": 14}}, "b": {"options": {"lr": 0.2}, "data": "cifar100"}}
    rows = [{"label": "r", "options": {"lr": 0.3}, "reported": {"b": 7}}]
    folder = write_table(tmp_path, columns=columns, rows=rows, options={"depth": 8, "lr": 0.1}, baseline="r")
    a, b = tables.cells(loading.load(folder / "small.yaml"))
    assert (a.options, a.data, a.reported) == ({"depth": 14, "lr": 0.3}, "digits", None)
    assert (b.options, b.data, b.reported) == ({"depth": 8, "lr": 0.3}, "cifar100", 7)


def test_a_table_takes_rows_from_another_file(tmp_path):
    known = loading.load(write_table(tmp_path, "good") / "good.yaml").rows
    write_table(tmp_path, "all", rows_from="good.yaml", baseline="")
    text = (tmp_path / "all.yaml").read_text("utf-8")
    (tmp_path / "all.yaml").write_text(text[: text.index("rows:")] + "rows_from: good.yaml\n", "utf-8")
    assert loading.load(tmp_path / "all.yaml").rows == known
    (tmp_path / "more").mkdir()
    own = [{"label": "plain", "options": {"depth": 14}}, "recursive", {"label": "new"}]
    write_table(tmp_path / "more", "some", rows_from="../good.yaml", rows=own)
    plain, recursive, new = loading.load(tmp_path / "more" / "some.yaml").rows
    assert recursive == known[1] and (new.equation, new.options) == ("", {})
    assert (plain.equation, plain.options, plain.reported) == ("x + F", {"depth": 14}, None)


def test_a_short_table_is_enough(tmp_path):
    (tmp_path / "own.yaml").write_text("data: digits\nrows:\n- label: a\n")
    table = loading.load(tmp_path / "own.yaml")
    assert loading.load(write_table(tmp_path, seeds=7) / "small.yaml").seeds == [7]
    about = (table.title, table.task, table.metric, table.seeds, table.baseline, table.source)
    assert about == ("own", "images", "error", [1], "", "")
    (tmp_path / "own.yaml").write_text("data: x\nrows:\n- {label: a, arch: transformer}\n")
    assert loading.load(tmp_path / "own.yaml").task == "translation"
    (tmp_path / "own.yaml").write_text("rows:\n- label: a\n")
    with pytest.raises(UserError, match="own.yaml: 'data' is missing"):
        loading.load(tmp_path / "own.yaml")


@pytest.mark.parametrize(
    ("more", "rows", "baseline"),
    [
        ("", "{label: a}, {label: b}", "a"),
        ("", "{label: quoted, run: false, reported: 6}, {label: a}, {label: b}", "a"),
        ("baseline: b", "{label: a}, {label: b}", "b"),
        ("source: Liu et al. 2020", "{label: a}, {label: b}", ""),
        ("", "{label: a}, {label: b, baseline: a}, {label: c}", ""),
    ],
    ids=["the first", "the first that is run", "the file's", "a publication's table", "rows name their own"],
)
def test_the_first_row_of_ones_own_table_is_the_baseline(tmp_path, more, rows, baseline):
    (tmp_path / "own.yaml").write_text(f"data: digits\n{more}\nrows: [{rows}]\n")
    assert loading.load(tmp_path / "own.yaml").baseline == baseline


def test_list_says_how_many_runs_a_table_is_and_what_its_rows_are(tmp_path, capfd):
    write_table(tmp_path)
    status, out, _ = reproduce(capfd, "list", "--experiments", tmp_path)
    assert status == 0 and "A table: 2 networks x 2 seeds = 4 runs (digits)" in out
    status, out, _ = reproduce(capfd, "list", "small", "--experiments", tmp_path)
    assert "plain  reported 6.31" in out and "skip-kind=rskip" in out
    status, _, error = reproduce(capfd, "list", "table9", "--experiments", tmp_path)
    assert status == 1 and error_line(error).startswith("no table named 'table9'; there are small, or")
