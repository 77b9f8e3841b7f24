"""What `reproduce.py run` plans: lengths and schedules at a scale, data, options, seeds, which runs are the same."""

import json
import shutil

import pytest
from reproduce_helpers import PLAIN, error_line, reproduce, write_table

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.reproduce import images, plans, tables
from fairseq_rskip.tools.reproduce.main import make_plan
from fairseq_rskip.tools.reproduce.options import parse
from fairseq_rskip.tools.reproduce.tables import StandIn
from fairseq_rskip.vision.config import Config

SMALL = "encoder-layers encoder-embed-dim encoder-ffn-embed-dim encoder-attention-heads".split()


@pytest.fixture(scope="module")
def shipped():
    return tables.load_all()


def plan(shipped, name, *words):
    """What `run NAME WORDS` plans of a shipped table."""
    return make_plan(shipped[name], parse(["run", name, *map(str, words)]))


def folders(shipped, tmp_path, name, *words):
    """(row, column, seed) -> the folder of its run."""
    made, task = plan(shipped, name, *words), shipped[name].task
    return {
        (*cell, seed): plans.run_folder(tmp_path, task, settings, seed)
        for seed in made.seeds
        for cell, settings in made.settings.items()
    }


def only(made):
    first, *twins = made.settings.values()
    assert all(twin == first for twin in twins)
    return first


def test_the_whole_table_is_the_papers_run(shipped):
    made = plan(shipped, "table1", "--rows", "2rSkip+LN")
    settings = only(made)
    assert made.whole and made.name == "table1" and made.seeds == [1, 2, 3, 4, 5]
    assert images.commands(settings, 3, shipped_folder := plans.run_folder(tables.ROOT, "images", settings, 3))
    config = Config(**settings)
    assert config == Config()  # train_cifar.py's defaults are the paper's 2rSkip+LN
    assert shipped_folder.name == "seed3"


def test_a_scaled_run_has_the_same_schedule_shortened(shipped):
    short = Config(**only(plan(shipped, "table1", "--rows", "1xSkip", "--scale", "0.1")))
    whole = Config(skip_kind="xskip", skip_lambda=1, skip_norm="none")
    assert (whole.iterations, whole.warmup_iterations) == (64000, 400)
    assert (short.iterations, short.warmup_iterations) == (6400, 40)
    for part in (0, 0.005, 0.00625, 0.3, 0.499, 0.5, 0.74, 0.75, 0.99):
        assert short.learning_rate(int(part * 6400)) == whole.learning_rate(int(part * 64000))


def test_milestones_of_ones_own_are_shortened_too(shipped):
    made = plan(shipped, "table1", "--rows", "1xSkip", "--scale", "0.1", "--set", "milestones=[32000, 48000]")
    assert only(made)["milestones"] == (3200, 4800)
    command = images.commands(json.loads(json.dumps(only(made))), 1, tables.ROOT)[0]  # as the plan's file gives it
    assert command[command.index("--milestones") + 1 :][:2] == ["3200", "4800"]


def test_a_tiny_scale_leaves_one_iteration(shipped):
    assert only(plan(shipped, "table1", "--rows", "1xSkip", "--scale", "0.00001"))["iterations"] == 1
    assert only(plan(shipped, "table2", "--rows", "1xSkip", "--scale", "0.000001"))["length"] == 1


def test_the_translation_corpora_are_shortened_by_updates(shipped):
    settings = only(plan(shipped, "table2", "--rows", "2rSkip+LN", "--scale", "0.1"))
    assert (settings["unit"], settings["length"]) == ("updates", 10_000)  # of train.sh's 100,000
    options = settings["options"]
    assert (options["max-update"], options["warmup-updates"], options["skip-lambda"]) == (10_000, 400, 2)
    assert 10_000 / options["save-interval-updates"] <= 100
    wmt = plan(shipped, "table7", "--rows", "Transformer-Big", "--columns", "EN-FR", "--scale", "0.5")
    assert only(wmt)["options"]["max-update"] == 275_000  # of the paper's 550,000


def test_the_stand_in_for_translation_is_a_small_model_of_5000_updates(shipped):
    made = plan(shipped, "table2", "--corpus", "multi30k", "--scale", "0.2", "--rows", "1xSkip+LN")
    settings = only(made)
    assert not made.whole and made.data == "multi30k-en-de"
    assert (settings["length"], settings["options"]["warmup-updates"]) == (1000, 160)  # of 5,000 and the recipe's 800
    assert [settings["options"][name] for name in SMALL] == [3, 256, 1024, 4]
    whole = only(plan(shipped, "table2", "--corpus", "multi30k", "--rows", "1xSkip+LN"))
    assert (whole["length"], whole["options"]["warmup-updates"]) == (5000, 800)


def test_ends_of_ones_own_win(shipped):
    ours = ("table2", "--rows", "1xSkip", "--set", "max-epoch=3")
    assert [only(plan(shipped, *ours))[key] for key in ("unit", "length")] == ["epochs", 3]
    settings = only(plan(shipped, *ours, "--corpus", "multi30k"))
    assert (settings["unit"], settings["length"]) == ("epochs", 3) and "max-update" not in settings["options"]
    with pytest.raises(UserError, match="by epochs, which --scale cannot shorten: give --set max-update=N"):
        plan(shipped, *ours, "--scale", "0.5")
    settings = only(plan(shipped, "table2", "--rows", "1xSkip", "--scale", "0.5", "--set", "max-update=300"))
    assert settings["length"] == settings["options"]["max-update"] == 150
    saving = ("--scale", "0.5", "--set", "save-interval-updates=7")
    assert only(plan(shipped, "table2", "--rows", "1xSkip", *saving))["options"]["save-interval-updates"] == 7


def test_identical_rows_of_different_tables_are_one_run(shipped, tmp_path):
    first = folders(shipped, tmp_path, "table1")
    assert folders(shipped, tmp_path, "table3")["x + F", "", 2] == first["1xSkip", "", 2]
    assert folders(shipped, tmp_path, "table4")["1xSkip", "", 2] == first["1xSkip", "", 2]
    assert first["1rSkip+LN", "", 1] == first["1xSkip+LN", "", 1]
    for name in ("wskip", "figure3", "figure4"):
        assert folders(shipped, tmp_path, name)["2rSkip+LN", "", 1] == first["2rSkip+LN", "", 1]
    second = folders(shipped, tmp_path, "table2")
    fifth, seventh = (folders(shipped, tmp_path, name) for name in ("table5", "table7"))
    assert fifth["1xSkip+LN", "6 blocks", 1] == second["1xSkip+LN", "", 1] == second["1rSkip+LN", "", 1]
    assert seventh["Transformer-Base", "EN-VI", 1] == second["1xSkip+LN", "", 1]


def test_different_settings_never_share_a_run(shipped, tmp_path):
    wanted = [(name, *words) for name in shipped for words in ((), ("--scale", "0.5"))]
    wanted += [("table1", "--set", "depth=20"), ("table1", "--set", "lr=0.2"), ("table1", "--corpus", "digits")]
    wanted += [("table2", "--corpus", "multi30k"), ("table2", "--set", "dropout=0.3")]
    found = {}
    for words in wanted:
        made, task = plan(shipped, *words), shipped[words[0]].task
        for settings in made.settings.values():
            commands = plans.TASKS[task].commands(settings, 1, tables.ROOT)
            folder = plans.run_folder(tmp_path, task, settings, 1)
            assert found.setdefault(folder, commands) == commands
    assert len({json.dumps(commands) for commands in found.values()}) == len(found) > 90


def test_the_folder_of_a_run_stays_the_one_that_it_was(shipped, tmp_path):
    """Finished runs are found by these names: a change of the hashing would train all of them again."""
    words = ("--corpus", "digits", "--set", "depth=8", "--scale", "0.0005", "--rows", "1xSkip", "2rSkip+LN")
    names = [path.parent.name for path in folders(shipped, tmp_path, "table1", *words, "--seeds", 1).values()]
    assert names == ["digits-resnet8-xskip1-none-32-1f17d231", "digits-resnet8-rskip2-layer-32-7238dda9"]
    whole = folders(shipped, tmp_path, "table2", "--rows", "2rSkip+LN").values()
    arch = "iwslt15-en-vi-transformer_rskip_ln_iwslt_en_vi"
    assert [path.parent.name for path in whole] == [f"{arch}-lambda2-100000-b5070dac"]


@pytest.mark.parametrize("other", [2.0, "2", "2e0"])
def test_one_number_is_one_run_however_it_is_written(shipped, tmp_path, other):
    cell = tables.cells(shipped["table1"])[1]
    stand_in = StandIn("images", "digits")
    ours, same = (images.settings(cell, "digits", stand_in, 1, {"skip-lambda": value}) for value in (2, other))
    assert plans.run_folder(tmp_path, "images", ours, 1) == plans.run_folder(tmp_path, "images", same, 1)


@pytest.mark.parametrize(
    "table, change, words",
    [
        ("table1", "device=cpu", ["--device", "cpu"]),
        ("table1", "save-interval=7", ["--save-interval", "7"]),
        ("table1", "compile=true", ["--compile"]),
        ("table2", "skip-log-interval=100", ["--skip-log-interval", "100"]),
    ],
)
def test_what_does_not_change_a_training_reaches_its_command_and_leaves_run_and_table_alone(
    shipped, tmp_path, table, change, words
):
    changed, task = plan(shipped, table, "--set", change), shipped[table].task
    assert changed.whole and changed.name == table
    assert folders(shipped, tmp_path, table, "--set", change) == folders(shipped, tmp_path, table)
    for settings in changed.settings.values():
        command = plans.TASKS[task].commands(settings, 1, tmp_path)[0]
        at = command.index(words[0])
        assert command[at : at + len(words)] == words


def test_where_a_folder_of_data_lies_does_not_count(shipped, tmp_path):
    for place in ("a", "b"):
        (tmp_path / place / "ảnh của tôi").mkdir(parents=True)
    one, two = (
        folders(shipped, tmp_path, "table1", "--corpus", tmp_path / place / "ảnh của tôi") for place in ("a", "b")
    )
    assert one == two
    prepared = tmp_path / "c" / "data-bin"
    prepared.mkdir(parents=True)
    (prepared / "preparation.json").write_text(json.dumps({"corpus": "multi30k-en-de", "src": "en", "tgt": "de"}))
    named = folders(shipped, tmp_path, "table2", "--corpus", "multi30k")
    there = plan(shipped, "table2", "--corpus", tmp_path / "c")
    assert folders(shipped, tmp_path, "table2", "--corpus", tmp_path / "c") == named  # the stand-in, by its path
    shutil.rmtree(tmp_path / "c")  # finished runs are found all the same
    first = {plans.run_folder(tmp_path, "translation", settings, 1) for settings in there.settings.values()}
    assert first == set(named.values())


def test_every_first_seed_comes_before_any_second(shipped, tmp_path):
    made = plan(shipped, "table1", "--seeds", 3, 1, 3)
    order = [job.seed for job in plans.jobs(made, "images", tmp_path)]
    assert made.seeds == [3, 1] and order == [3] * 8 + [1] * 8  # nine rows, two of them one run


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("table1", "--rows", "4xSkip"), "table1 has no row '4xSkip' to run; it has 1xSkip, 2xSkip"),
        (("table7", "--rows", "Zhang et al. 2019, Fixup"), "no row 'Zhang et al. 2019, Fixup' to run; it has Transf"),
        (("table5", "--columns", "3 blocks"), "table5 has no column '3 blocks' to run; it has 6 blocks, 2 blocks"),
        (("table1", "--corpus", "multi30k"), "--corpus multi30k is for translation, and table1 is of images"),
        (("table2", "--corpus", "digits"), "--corpus digits is for images, and table2 is of translation"),
        (("table1", "--corpus", "mnist"), "'mnist' is no folder of images, and none of cifar10, cifar100, digits"),
        (("table2", "--corpus", "wmt15"), "'wmt15' is no prepared folder, and none of iwslt15-en-vi"),
        (("table1", "--set", "dept=8"), "--set, for "),
        (
            ("table1", "--set", "dept=8"),
            "train_cifar.py takes no option 'dept' here; it takes data-dir, cache, train-images",
        ),
        (("table1", "--set", "data=digits"), "train_cifar.py takes no option 'data' here"),
        (("table1", "--set", "depth=9"), "row '1xSkip': --depth 9: expected 6n+2"),
        (("table1", "--set", "depth=8.5"), "option 'depth' is 8.5; expected an integer"),
        (("table1", "--set", "depth='8'"), "option 'depth' is '8'; expected an integer"),
        (("table1", "--set", "flip=1"), "option 'flip' is 1; expected true or false"),
        (("table1", "--set", "skip-lambda=true"), "option 'skip-lambda' is True; expected a number"),
        (("table1", "--set", "lr=fast"), "option 'lr' is 'fast'; expected a number"),
        (("table1", "--set", "milestones=[]"), "option 'milestones' is []; expected integers"),
        (("table1", "--set", "lr=.inf"), "--lr inf: expected a number > 0"),
        (("table2", "--set", "drpout=0.3"), "fairseq-train takes no --drpout 0.3"),
        (("table2", "--set", "max-update=many", "--scale", "0.5"), "many"),
        (("table2", "--set", "max-update=[1]"), "option 'max-update' is [1]; expected one value"),
        (("table2", "--set", "save-dir=/x"), "option 'save-dir' is set by reproduce.py itself"),
        (("table2", "--set", "encoder-attention-heads=3"), "--encoder-attention-heads 3 does not divide"),
    ],
)
def test_what_cannot_be_planned_is_one_line(shipped, words, part):
    with pytest.raises(UserError) as error:
        plan(shipped, *words)
    assert part in str(error.value) and "\n" not in str(error.value), error.value


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"arch": "transformer_zskip"}, "row 'mine': "),
        ({"arch": "transformer_xskip_iwslt_en_v"}, "no architecture named 'transformer_xskip_iwslt_en_v'"),
        ({"arch": "transformer_xskip_iwslt_en_vi", "options": {"skip-lamda": 1}}, "row 'mine': fairseq-train takes no"),
        ({"arch": "transformer_xskip_iwslt_en_vi", "options": {"seed": 3}}, "row 'mine': option 'seed' is set by"),
    ],
)
def test_an_error_of_a_row_names_its_file(tmp_path, capfd, changes, part):
    rows = [{"label": "mine", **changes}]
    table = {"task": "translation", "metric": "chrF", "data": "multi30k-en-de", "options": {}, "baseline": ""}
    write_table(tmp_path, rows=rows, **table)
    status, out, error = reproduce(capfd, "run", "small", "--experiments", tmp_path, "--output", tmp_path / "out")
    line = error_line(error.splitlines()[-1])
    assert status == 1 and line.startswith(str(tmp_path / "small.yaml")) and part in line
    assert not (tmp_path / "out").exists()


def test_a_plan_remembers_the_rows_and_seeds_of_earlier_ones(shipped, tmp_path):
    words = ("table1", "--corpus", "digits", "--set", "depth=8")
    for more in (("--rows", "1xSkip", "--seeds", 2), ("--rows", "2rSkip+LN", "--seeds", 1, 2)):
        plans.save(plan(shipped, *words, *more), tmp_path)
    plans.save(plan(shipped, "table1"), tmp_path)
    other, one = plans.load_all(tmp_path)
    assert (one.name, one.whole, other.whole) == ("table1", True, False)
    assert other.seeds == [2, 1] and list(other.settings) == [("1xSkip", ""), ("2rSkip+LN", "")]
    assert (other.data, other.scale, other.changed) == ("digits", 1, {"depth": 8})


def test_different_plans_have_different_names(shipped, tmp_path):
    for name in ("ảnh", "ẩnh", "a b", "a_b"):
        (tmp_path / name).mkdir()
    words = [("--corpus", tmp_path / name) for name in ("ảnh", "ẩnh", "a b", "a_b")]
    words += [("--scale", "0.12345678"), ("--scale", "0.12345679"), ("--set", "lr=0.1"), ("--set", "lr=0.2")]
    many = [
        f"{name}=0.{'123456789' * 2}"
        for name in ("lr", "lr-factor", "momentum", "skip-init", "skip-lambda", "warmup-lr")
    ]
    words += [("--set", *many, "weight-decay=0.1"), ("--set", *many, "weight-decay=0.2")]
    made = [plan(shipped, "table1", "--rows", "1xSkip", *more) for more in words]
    assert len({one.name for one in made}) == len(made)
    assert all(len(one.name) < 200 and one.name.isascii() and "/" not in one.name for one in made)
    assert plan(shipped, "table1", "--scale", "0.0125", "--set", "depth=20").name == "table1-scale0.0125-depth-20"


def test_the_options_that_make_a_run_are_all_on_its_command_line(shipped, tmp_path):
    from fairseq_rskip.vision.config import parse as read_command

    settings = only(plan(shipped, "table1", "--rows", "1xSkip", "--scale", "0.01", "--set", "flip=false", "crop=0"))
    command = images.commands(settings, 4, tmp_path / "seed4")[0]
    config = read_command(command[2:], "")
    assert config.seeds == (4,) and config.resume and config.folder() == tmp_path
    wanted = Config(**{k.replace("-", "_"): v for k, v in PLAIN.items()}, flip=False, crop=0)
    wanted = {**wanted.fixed(), "iterations": 640, "warmup_iterations": 4}
    assert config.fixed() == wanted
