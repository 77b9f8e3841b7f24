"""What `reproduce.py run` plans: lengths, schedules, data, options, seeds, sweeps."""

from pathlib import Path

import pytest
from reproduce_helpers import PLAIN, TABLE, config, error_line, only, plan, reproduce, shipped, write_table

from fairseq_rskip.console import as_words
from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.reproduce import loading, plans
from fairseq_rskip.tools.reproduce.main import make_plan
from fairseq_rskip.tools.reproduce.options import parse
from fairseq_rskip.tools.reproduce.runs import ready_runs
from fairseq_rskip.vision.config import Config

SCORED = {"task": "translation", "metric": "valid_loss", "also": ["chrF"], "data": "multi30k-en-de", "options": {}}

SCORED["baseline"] = ""

SMALL = "encoder-layers encoder-embed-dim encoder-ffn-embed-dim encoder-attention-heads".split()


def test_the_whole_table_is_the_papers_run():
    made = plan("table1", "--rows", "2rSkip+LN")
    assert made.whole and made.name == "table1" and made.seeds == [1, 2, 3, 4, 5]
    assert config(made, 3).fixed() == Config().fixed()  # train_cifar.py's defaults are the paper's 2rSkip+LN


def test_a_scaled_run_has_the_same_schedule_shortened():
    short = config(plan("table1", "--rows", "1xSkip", "--scale", "0.1"))
    whole = Config(skip_kind="xskip", skip_lambda=1, skip_norm="none")
    assert (whole.iterations, whole.warmup_iterations) == (64000, 400)
    assert (short.iterations, short.warmup_iterations) == (6400, 40)
    for part in (0, 0.005, 0.00625, 0.3, 0.499, 0.5, 0.74, 0.75, 0.99):
        assert short.learning_rate(int(part * 6400)) == whole.learning_rate(int(part * 64000))
    own = ("--set", "milestones=[32000, 48000]", "flip=false", "crop=0")
    short = config(plan("table1", "--rows", "1xSkip", "--scale", "0.1", *own))
    assert (short.milestones, short.flip, short.crop) == ((3200, 4800), False, 0)
    assert only(plan("table1", "--rows", "1xSkip", "--scale", "0.00001")).length == 1
    assert only(plan("table2", "--rows", "1xSkip", "--scale", "0.000001")).length == 1


def test_the_translation_corpora_are_shortened_by_updates():
    settings = only(plan("table2", "--rows", "2rSkip+LN", "--scale", "0.1"))
    assert (settings.unit, settings.length) == ("updates", 10_000)  # of train.sh's 100,000
    options = settings.options
    assert (options["max-update"], options["warmup-updates"], options["skip-lambda"]) == (10_000, 400, 2)
    assert 10_000 / options["save-interval-updates"] <= 100
    wmt = plan("table7", "--rows", "Transformer-Big", "--columns", "EN-FR", "--scale", "0.5")
    assert only(wmt).options["max-update"] == 275_000  # of the paper's 550,000


def test_a_table_of_losses_translates_nothing(tmp_path):
    """What shows scores is another run, for it has been evaluated, too."""
    made = plan("rivals", "--rows", "DLCL")
    cell = made.cells[0]
    (command,) = plans.make_run(made, cell.variants[0], 1, tmp_path).commands()
    assert command[0].endswith("train.sh")
    table = write_table(tmp_path, **{**SCORED, "rows": [{"label": "only", "arch": "transformer_dlcl"}]})
    scored = plan("small", tables=loading.load_all(table, pytest.fail))
    commands = plans.make_run(scored, scored.cells[0].variants[0], 1, tmp_path).commands()
    assert [Path(command[0]).name for command in commands] == ["train.sh", "evaluate.sh"]


@pytest.mark.parametrize(
    ("options", "average", "kept"),
    [
        ({"save-interval-updates": 20, "max-update": 60}, 2, ["--keep-interval-updates", "2"]),
        ({"save-interval-updates": 20, "keep-interval-updates": 3}, 4, []),
        ({"save-interval-updates": 20}, None, []),
        ({}, 2, []),
        ({}, 12, ["--keep-last-epochs", "12"]),
    ],
    ids=["by updates", "kept as the file says", "nothing asked", "the recipe's epochs", "more than the recipe's"],
)
def test_as_many_checkpoints_are_kept_as_evaluation_averages(tmp_path, options, average, kept):
    rows = [{"label": "only", "arch": "transformer_dlcl", "options": options}]
    evaluate = {} if average is None else {"average": average}
    table = write_table(tmp_path, **{**SCORED, "rows": rows, "evaluate": evaluate})
    made = plan("small", tables=loading.load_all(table, pytest.fail))
    variant = made.cells[0].variants[0]
    assert variant.settings.identity["options"] == options  # how many are kept is no part of what a run is
    train, _ = plans.make_run(made, variant, 1, tmp_path).commands()
    assert sorted(train[3:-4]) == sorted([*as_words(options), *kept])


def test_the_stand_in_for_translation_is_a_small_model_of_5000_updates():
    made = plan("table2", "--corpus", "multi30k", "--scale", "0.2", "--rows", "1xSkip+LN")
    settings = only(made)
    assert not made.whole and made.data == "multi30k-en-de"
    assert (settings.length, settings.options["warmup-updates"]) == (1000, 160)  # of 5,000 and the recipe's 800
    assert [settings.options[name] for name in SMALL] == [3, 256, 1024, 4]
    assert only(plan("table2", "--corpus", "multi30k", "--rows", "1xSkip+LN")).length == 5000


def test_ends_of_ones_own_win():
    ours = ("table2", "--rows", "1xSkip", "--set", "max-epoch=3")
    for more in ((), ("--corpus", "multi30k")):
        settings = only(plan(*ours, *more))
        assert (settings.unit, settings.length) == ("epochs", 3) and "max-update" not in settings.options
    with pytest.raises(UserError, match="by epochs, which --scale cannot shorten: give --set max-update=N"):
        plan(*ours, "--scale", "0.5")
    own = ("--scale", "0.5", "--set", "max-update=300", "save-interval-updates=7")
    settings = only(plan("table2", "--rows", "1xSkip", *own))
    assert settings.length == settings.options["max-update"] == 150
    assert settings.options["save-interval-updates"] == 7


def test_other_data_goes_into_columns_of_one_corpus_only():
    said = "table7 has columns of iwslt15-en-vi, wmt14-en-de, wmt14-en-fr: --corpus needs"
    with pytest.raises(UserError, match=said):
        plan("table7", "--corpus", "iwslt15-en-vi")
    assert plan("table7", "--corpus", "iwslt15-en-vi", "--columns", "EN-VI").whole
    assert not plan("table7", "--corpus", "iwslt15-en-vi", "--columns", "EN-DE").whole


def test_rows_that_are_one_network_are_chosen_together():
    rows = [[cell.row for cell in plan("table1", "--rows", row).cells] for row in ("1rSkip+LN", "2rSkip+LN")]
    assert rows == [["1xSkip+LN", "1rSkip+LN"], ["2rSkip+LN"]]


def test_a_table_whose_file_changed_since_is_not_the_same_any_more(tmp_path):
    write_table(tmp_path)
    made = make_plan(loading.load(tmp_path / "small.yaml"), parse(["run", "small"]))
    assert plans.outdated(made, made.table) == []
    write_table(tmp_path, options={**TABLE["options"], "depth": 14})
    assert plans.outdated(made, plans.current_table(made, None)) == ["plain", "recursive"]


def test_every_first_seed_comes_before_any_second(tmp_path):
    made = plan("table1", "--seeds", 3, 1, 3)
    order = [run.seed for run in ready_runs(made, tmp_path)]
    assert made.seeds == [3, 1] and order == [3] * 8 + [1] * 8  # nine rows, two of them one run


REFUSED = [
    (("table1", "--rows", "4xSkip"), "table1 has no row '4xSkip' to run; it has 1xSkip, 2xSkip"),
    (("table7", "--rows", "Zhang et al. 2019, Fixup"), "no row 'Zhang et al. 2019, Fixup' to run; it has Transf"),
    (("table5", "--columns", "3 blocks"), "table5 has no column '3 blocks' to run; it has 6 blocks, 2 blocks"),
    (("table1", "--corpus", "multi30k"), "--corpus multi30k is for translation, and table1 is of images"),
    (("table2", "--corpus", "digits"), "--corpus digits is for images, and table2 is of translation"),
    (("table1", "--corpus", "mnist"), "'mnist' is no folder of images, and none of cifar10, cifar100, digits"),
    (("table2", "--corpus", "wmt15"), "'wmt15' is no prepared folder, and none of iwslt15-en-vi"),
    (("table1", "--set", "dept=8"), "--set, for "),
    (("table1", "--set", "dept=8"), "train_cifar.py takes no option 'dept' here; did you mean 'depth'?"),
    (("table1", "--set", "data=digits"), "train_cifar.py takes no option 'data' here"),
    (("table1", "--set", "depth=9"), "row '1xSkip' and 8 more: --depth 9: expected 6n+2"),
    (("table1", "--set", "depth=8.5"), "--depth: invalid int value: '8.5'"),
    (("table1", "--set", "flip=1"), "option 'flip' is 1; expected true or false"),
    (("table1", "--set", "depth=true"), "option 'depth' is True; expected a value"),
    (("table1", "--set", "lr=fast"), "'fast'"),
    (("table1", "--set", "milestones=[]"), "--milestones: expected at least one argument"),
    (("table1", "--set", "lr=.inf"), "--lr inf: expected a number > 0"),
    (("table2", "--set", "drpout=0.3"), "--drpout"),
    (("table2", "--set", "max-update=many", "--scale", "0.5"), "many"),
    (("table2", "--set", "max-update=[1]"), "option 'max-update' is [1]; expected one value"),
    (("table2", "--set", "save-dir=/x"), "option 'save-dir' cannot be given here: every run"),
    (("table2", "--set", "dropout=2"), "dropout"),
    (("table2", "--set", "encoder-attention-heads=3"), "--encoder-attention-heads 3 does not divide"),
]


@pytest.mark.parametrize(("words", "part"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_what_cannot_be_planned_is_one_line(words, part):
    with pytest.raises(UserError) as error:
        plan(*words)
    assert part in str(error.value) and "\n" not in str(error.value), error.value


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"arch": "transformer_zskip"}, "row 'mine': "),
        ({"arch": "transformer_xskip_iwslt_en_vi", "options": {"skip-lamda": 1}}, "skip-lamda"),
        ({"arch": "transformer_xskip_iwslt_en_vi", "options": {"seed": 3}}, "row 'mine': option 'seed' cannot be"),
        ({"arch": "transformer", "evaluate": {"bean": 5}}, "row 'mine': evaluate names 'bean'; expected average, beam"),
        ({"arch": "transformer", "evaluate": {"beam": 0}}, "row 'mine': --beam: '0' is not a whole number of at least"),
    ],
    ids=["architecture", "option", "reserved option", "evaluation", "beam"],
)
def test_an_error_of_a_row_names_its_file(tmp_path, capfd, changes, part):
    rows = [{"label": "mine", **changes}]
    table = {"task": "translation", "metric": "chrF", "data": "multi30k-en-de", "options": {}, "baseline": ""}
    write_table(tmp_path, rows=rows, **table)
    status, out, error = reproduce(capfd, "run", "small", "--experiments", tmp_path, "--output", tmp_path / "out")
    line = error_line(error.splitlines()[-1])
    assert status == 1 and line.startswith(str(tmp_path / "small.yaml")) and part in line
    assert not (tmp_path / "out").exists()


def test_the_mistakes_of_all_rows_are_shown_at_once(tmp_path):
    rows = [{"label": label, "options": {name: 1}} for label, name in (("a", "dept"), ("b", "lrr"), ("c", "dept"))]
    table = loading.load(write_table(tmp_path, rows=rows, baseline="") / "small.yaml")
    with pytest.raises(UserError) as error:
        make_plan(table, parse(["run", "small"]))
    dept, lrr = str(error.value).split("\nerror: ")
    said = "train_cifar.py takes no option"
    assert dept == f"{table.path}, row 'a' and 1 more: {said} 'dept' here; did you mean 'depth'?"
    assert lrr == f"{table.path}, row 'b': {said} 'lrr' here; did you mean 'lr'?"


def test_a_plan_remembers_the_rows_and_seeds_of_earlier_ones(tmp_path):
    words = ("table1", "--corpus", "digits", "--set", "depth=8")
    for more in (("--rows", "1xSkip", "--seeds", 2), ("--rows", "2rSkip+LN", "--seeds", 1, 2)):
        plans.save(plan(*words, *more), tmp_path)
    plans.save(plan("table1"), tmp_path)
    other, one = plans.load_all(tmp_path)
    assert (one.name, one.whole, other.whole) == ("table1", True, False) and one.table == shipped()["table1"]
    assert other.seeds == [2, 1] and [cell.row for cell in other.cells] == ["1xSkip", "2rSkip+LN"]
    assert (other.data, other.scale, other.changed) == ("digits", 1, {"depth": 8})


def test_a_sweep_is_a_run_for_each_combination_with_the_first_seeds(tmp_path):
    write_table(
        tmp_path,
        seeds=[5, 6, 7],
        options={**TABLE["options"], "valid-images": 100},
        sweep={"lr": [0.1, 0.2], "momentum": [0.5, 0.9]},
        rows=[
            {"label": "swept", "options": PLAIN},
            {"label": "other", "sweep": {"lr": [0.3, 0.1]}},
            {"label": "fixed", "sweep": {}},
        ],
        baseline="",
    )
    table = loading.load(tmp_path / "small.yaml")
    made = make_plan(table, parse(["run", "small", "--seeds", "6", "7"]))
    runs = [
        (run.settings.options.get("lr"), run.settings.options.get("momentum"), run.seed)
        for run in ready_runs(made, tmp_path)
    ]
    swept = [(0.1, 0.5, 5), (0.1, 0.9, 5), (0.2, 0.5, 5), (0.2, 0.9, 5), (0.3, None, 5), (0.1, None, 5)]
    assert runs == [*swept, (None, None, 6), (None, None, 7)]
    made = make_plan(table, parse(["run", "small", "--rows", "other", "--set", "lr=0.7"]))
    assert [run.settings.options["lr"] for run in ready_runs(made, tmp_path)] == [0.7] * 3  # --set wins over a sweep
