"""Curves of trainings, from logs written by hand.

The tests look at what of them comes back in figure, table and CSV.
"""

import csv
import json

import pandas
import pytest
from vision_helpers import error_line

from fairseq_rskip.analysis import curves, figures
from fairseq_rskip.analysis.skip_log import SkipLines
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.tools import analyze

START = "2026-01-01 10:00:00 | INFO | "


def line(source, step, loss, nll=1.0):
    """Return a line as fairseq writes it with --log-format json.

    It is of an interval (train_inner), an epoch or a validation.
    """
    prefix = "" if source == "train_inner" else f"{source}_"
    values = {
        "loss": loss,
        "nll_loss": nll,
        "ppl": round(2**nll, 2),
        "wps": 1261.9,
        "num_updates": step,
    }
    record = {"epoch": 1, **{f"{prefix}{k}": str(v) for k, v in values.items()}}
    return f"{START}{source} | {json.dumps(record)}\n"


def fairseq_run(folder, *lines):
    folder.mkdir(parents=True)
    noise = (
        f"recipe: x\n{START}fairseq_cli.train | {{'lr': [0.1], 'loss': 3}}\n"
        f"{START}train | task: TranslationTask\n"
    )
    (folder / "train.log").write_text(noise + "".join(lines), "utf-8")
    return folder


def cifar_run(folder, *errors):
    folder.mkdir(parents=True)
    records = [
        {"iteration": 10 * k, "train_loss": 2.0 / k, "test_error": error}
        for k, error in enumerate(errors, 1)
    ]
    (folder / "log.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records), "utf-8"
    )
    return folder


def skip_run(folder, values):
    """``values``: (tag, step) -> value, as a training with --skip-log-interval logs them."""
    folder.mkdir(parents=True)
    lines = SkipLines(folder, 1)
    for step in sorted({step for _, step in values}):
        lines.write(step, {tag: value for (tag, at), value in values.items() if at == step})
    return folder


def draw(name, stem, *arguments):
    return exit_status(lambda: analyze.run([name, "--output", str(stem), *map(str, arguments)]))


def table(stem):
    """run -> curve -> [(step, value)], read from the CSV; seeds one after the other."""
    actual = {}
    for row in csv.DictReader(stem.with_suffix(".csv").open(encoding="utf-8")):
        point = (int(row["step"]), float(row["value"]))
        actual.setdefault(row["run"], {}).setdefault(row["curve"], []).append(point)
    return actual


def printed(capfd):
    """The cells of each line of the table, without the headings.

    Before it matplotlib may say that it makes its cache of fonts, on a machine that is busy.
    """
    lines = capfd.readouterr().out.splitlines()
    (heading,) = [k for k, line in enumerate(lines) if line.startswith("run ")]
    return [line.split() for line in lines[heading + 1 : -1]]


def test_fairseq_logs_come_back_number_by_number(tmp_path, capfd):
    inner, ends = (
        line("train_inner", 100, 10.5, 9.25),
        [line("valid", 150, 8.5, 7.0), line("train", 251, 8.0, 7)],
    )
    fairseq_run(tmp_path / "một lần", inner, ends[0], line("train_inner", 200, 7.25, 6.0), ends[1])
    fairseq_run(tmp_path / "two", line("train_inner", 100, "nan"), line("valid", 150, 9, 3))
    stem = tmp_path / "hình" / "đường"
    assert draw("curves", stem, f"2rSkip+LN={tmp_path / 'một lần'}", tmp_path / "two") == 0
    first, second = printed(capfd)
    assert first == ["2rSkip+LN", "200", "10.5", "→", "7.25", "128"]
    assert second == ["two", "150", "nan", "8"]
    assert table(stem)["2rSkip+LN"] == {
        "train_inner_loss": [(100, 10.5), (200, 7.25)],
        "train_inner_nll_loss": [(100, 9.25), (200, 6.0)],
        "train_inner_ppl": [(100, 608.87), (200, 64.0)],
        **{"valid_loss": [(150, 8.5)], "valid_nll_loss": [(150, 7.0)], "valid_ppl": [(150, 128.0)]},
        **{"train_loss": [(251, 8.0)], "train_nll_loss": [(251, 7.0)], "train_ppl": [(251, 128.0)]},
    }
    assert (stem.parent / "đường.png").read_bytes()[:4] == b"\x89PNG"
    assert (stem.parent / "đường.pdf").read_bytes()[:4] == b"%PDF"


def inner_losses(folder, *lines):
    return curves.read_log(fairseq_run(folder, *lines) / "train.log", curves.FAIRSEQ)[
        "train_inner_loss"
    ]


def test_a_resumed_run_keeps_the_last_of_what_it_repeats(tmp_path):
    lines = [
        line("train_inner", step, loss)
        for step, loss in ((20, 9), (40, 8), (60, 6), (80, 4), (60, 6.5))
    ]
    assert inner_losses(tmp_path / "run", *lines) == {
        20: 9,
        40: 8,
        60: 6.5,
    }  # 80 is still to be repeated
    # a line that a kill cut off, at the log's end, and where a resumed run wrote on behind it
    assert inner_losses(tmp_path / "cut", lines[0], lines[1][:-9]) == {20: 9}
    assert inner_losses(tmp_path / "on", lines[0], lines[1][:-9] + "recipe: x\n" + lines[2]) == {
        20: 9,
        60: 6,
    }


def test_what_every_log_has_is_drawn(tmp_path):
    whole = fairseq_run(
        tmp_path / "a", *(line(name, 20, 9) for name in ("train_inner", "train", "valid"))
    )
    short = fairseq_run(tmp_path / "b", line("train", 5, 8))  # fewer updates than --log-interval
    for runs, names in (
        ([whole], ["train_inner_loss", "valid_ppl"]),
        ([whole, short], ["train_loss", "valid_ppl"]),
        ([short], ["train_loss"]),
    ):
        assert list(curves.shown(*curves.read([str(run) for run in runs], 0))) == names


def test_cifar_seeds_share_a_label_and_are_thin_beside_their_mean(tmp_path, capfd):
    for seed, errors in (("seed1", [50, 30, 20]), ("seed2", [55, 33]), ("seed10", [60])):
        cifar_run(tmp_path / "đồ thị" / seed, *errors)
    with open(tmp_path / "đồ thị" / "seed2" / "log.jsonl", "a", encoding="utf-8") as log:
        log.write('{"iteration": 30, "tra')  # what a kill leaves
    logs = [log.parent.name for log, _ in curves.find_logs(tmp_path / "đồ thị")]
    assert logs == ["seed1", "seed2", "seed10"]
    runs = [
        str(tmp_path / "đồ thị"),
        *(f"one={cifar_run(tmp_path / name, 40, 50)}" for name in "bc"),
    ]
    assert draw("curves", tmp_path / "x", *runs, "--first", 20) == 0
    assert table(tmp_path / "x") == {
        "đồ thị": {
            "train_loss": [(20, 1), (30, 2 / 3), (20, 1)],
            "test_error": [(20, 30), (30, 20), (20, 33)],
        },
        "one": {"train_loss": [(20, 1), (20, 1)], "test_error": [(20, 50), (20, 50)]},
    }
    assert [" ".join(cells[-7:]) for cells in printed(capfd)][:2] == [
        "30 1 → 0.6667 30 → 20",
        "đồ thị, seed2 20 1 33",
    ]
    form, points = curves.read(runs, 20)
    figure = curves.draw(points, curves.shown(form, points), form.step, spread=())
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["đồ thị", "one"]
    mean, *seeds, other = figure.axes[1].get_lines()[:4]
    assert [list(line.get_ydata()) for line in (mean, *seeds)] == [[31.5], [30, 20], [33]]
    assert mean.get_linewidth() > seeds[0].get_linewidth() and mean.get_color() != other.get_color()


def test_what_cannot_be_drawn_is_one_line(tmp_path, capfd):
    cifar, fairseq = (
        cifar_run(tmp_path / "cifar", 50),
        fairseq_run(tmp_path / "fairseq", line("train_inner", 20, 9)),
    )
    (cifar_run(tmp_path / "number") / "log.jsonl").write_text("7\n")
    (tmp_path / "empty").mkdir()
    for runs, message in (
        (
            [tmp_path / "empty"],
            "expected log.jsonl of train_cifar.py or train.log of fairseq-train",
        ),
        ([tmp_path / "no"], f"{tmp_path}/no does not exist"),
        ([tmp_path / "number"], f"{tmp_path}/number/log.jsonl is not a log of train_cifar.py"),
        ([cifar, cifar], "two runs are called cifar"),
        ([cifar, fairseq], "draw them in two figures"),
        ([cifar, "--first", 11], "no run has logged anything from 11 on"),
    ):
        assert draw("curves", tmp_path / "x", *runs) == 1
        assert message in error_line(capfd.readouterr().err)
    assert not list(tmp_path.glob("x.*"))


def test_a_course_is_the_geometric_mean_over_blocks_and_seeds(tmp_path, capfd):
    first = {
        ("skip_F_over_x/a", 10): 1.0,
        ("skip_F_over_x/b", 10): 4.0,
        ("skip_F_over_x/a", 20): 9.0,
        ("skip_F_over_x/a", 30): 9.0,
    }
    skip_run(tmp_path / "run" / "seed2" / "tensorboard" / "skip", {**first, ("loss", 10): 3.0})
    second = {
        ("skip_F_over_x/a", 10): 16.0,
        ("skip_lambda/a", 10): 2.5,
        ("skip_F_over_x/b", 10): 0.0,
        ("skip_F_over_x/a", 30): 0.0,
    }
    skip_run(tmp_path / "run" / "seed10", second)
    assert draw("course", tmp_path / "course", f"2rSkip={tmp_path / 'run'}") == 0
    # (1 * 4 * 16) ** (1/3): what is 0 has no logarithm; update 20 is of one seed only, and of
    # update 30 one seed has nothing above 0
    assert printed(capfd) == [["2rSkip", "10", "4", "2.5"]]
    rows = list(csv.DictReader((tmp_path / "course.csv").open(encoding="utf-8")))
    assert len(rows) == 8 and [row["seed"] for row in rows] == [*"11112222"]


def test_by_block_a_course_is_the_last_update_against_depth(tmp_path, capfd):
    tag = "skip_grad_norm/encoder.layers.{}.final_skip".format
    values = {(tag(layer), step): step * 10.0**-layer for layer in (0, 1, 2) for step in (10, 20)}
    four = {key: 4 * value for key, value in values.items()}
    runs = [
        f"deep={skip_run(tmp_path / name, each)}" for name, each in (("one", values), ("two", four))
    ]
    assert draw("course", tmp_path / "depth", "--by-block", *runs) == 0
    assert printed(capfd) == [
        ["deep", "3", "40", "→", "0.4"]
    ]  # sqrt(20 * 80), of block 1; of block 3 a hundredth
    rows = csv.DictReader((tmp_path / "depth.csv").open(encoding="utf-8"))
    actual = [(row["seed"], row["number"], row["step"]) for row in rows]
    assert actual == [(seed, number, "20") for seed in "12" for number in "123"]
    skip_run(tmp_path / "plain", {("loss", 10): 3.0})
    assert draw("course", tmp_path / "none", tmp_path / "plain") == 1
    line = error_line(capfd.readouterr().err)
    assert "plain has no values in a skips.jsonl" in line and "of at least N updates" in line


def test_by_block_a_layer_that_layerdrop_left_out_at_first_has_its_number(tmp_path):
    """The first logged update of the second seed lacks layer 1 and the last block of layer 0."""
    names = ("self_attn_skip", "final_skip")
    blocks = [f"decoder.layers.{layer}.{name}" for layer in (0, 1, 2) for name in names]
    all_of = {(f"skip_grad_norm/{block}", 20): n for n, block in enumerate(blocks, 1)}
    first = {(f"skip_grad_norm/{block}", 10): 1.0 for block in (blocks[0], *blocks[4:])}
    skip_run(tmp_path / "a" / "seed1", all_of)
    skip_run(tmp_path / "a" / "seed2", {**first, **all_of})
    for rows in curves.read_skips(tmp_path / "a", at_the_end=True):
        assert [(row["number"], row["value"]) for row in rows] == [(n, n) for n in range(1, 7)]


@pytest.mark.parametrize(
    ("seeds", "option", "reason"),
    [
        ([{10: 1.5, 20: 1.5}, {15: 1.5, 25: 1.5}], (), "its 2 seeds share no logged update"),
        ([{10: 0.0, 20: -1.0}], (), "no logged value is positive"),
        ([{10: 0.0}, {10: 0.0}], ("--by-block",), "no logged value is positive"),
    ],
    ids=["apart", "zero", "by block"],
)
def test_a_run_of_which_a_course_has_no_point_is_one_line(tmp_path, capfd, seeds, option, reason):
    tag = "skip_x_to_F/encoder.layers.0.final_skip"
    for number, values in enumerate(seeds, 1):
        skip_run(tmp_path / "a" / f"seed{number}", {(tag, at): v for at, v in values.items()})
    assert draw("course", tmp_path / "x", *option, tmp_path / "a") == 1
    line = error_line(capfd.readouterr().err)
    assert line.startswith(f"a: {reason}") and ": expected " in line
    assert not list(tmp_path.glob("x.*"))

    other = skip_run(tmp_path / "b", {(tag, 10): 2.0})
    assert draw("course", tmp_path / "x", *option, tmp_path / "a", other) == 0
    out, err = capfd.readouterr()
    assert f"warning: {line}; it is left out\n" in err
    assert "\nb " in out and "\na " not in out


def test_a_stem_is_checked_before_anything_is_computed(tmp_path):
    assert figures.check_stem(tmp_path / "một" / "v1.5") == tmp_path / "một" / "v1.5"
    assert (tmp_path / "một").is_dir() and list((tmp_path / "một").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write into .*file: "):
        figures.check_stem(tmp_path / "file" / "x")


def test_the_thick_line_is_the_mean_of_three_seeds():
    values = {"seed1": 2.0, "seed2": 4.0, "seed3": 9.0}
    points = pandas.DataFrame(
        {"run": "a", "log": seed, "curve": "train_loss", "step": 10, "value": value}
        for seed, value in values.items()
    )
    figure = curves.draw(points, {"train_loss": "loss"}, "iteration", spread=())
    mean, *seeds = figure.axes[0].get_lines()
    assert list(mean.get_ydata()) == [5.0]
    assert [list(line.get_ydata()) for line in seeds] == [[2.0], [4.0], [9.0]]


def test_the_last_update_of_a_network_lacks_a_layer_that_layerdrop_left_out(tmp_path):
    """No value of an earlier update is drawn in its place."""
    lines = SkipLines(tmp_path, 1)
    lines.write(10, {f"skip_x_to_F/decoder.layers.{n}.final_skip": 1.0 for n in (0, 1)})
    lines.write(20, {"skip_x_to_F/decoder.layers.0.final_skip": 2.0})
    (rows,) = curves.read_skips(tmp_path, at_the_end=True)
    assert [(row["step"], row["number"], row["value"]) for row in rows] == [(20, 1, 2.0)]
