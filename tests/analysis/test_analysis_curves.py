"""Learning curves: logs written by hand, and what of them comes back in figure, table and CSV."""

import csv
import json

from vision_helpers import error_line

from fairseq_rskip.analysis import curves
from fairseq_rskip.tools import analyze

START = "2026-01-01 10:00:00 | INFO | "


def line(source, step, **values):
    """A line as fairseq writes it with --log-format json."""
    prefix = "" if source == "train_inner" else f"{source}_"
    said = {"epoch": 1, **{f"{prefix}{name}": str(value) for name, value in values.items()}}
    return f"{START}{source} | {json.dumps({**said, f'{prefix}num_updates': str(step)})}\n"


def inner(step, loss, nll=1.0):
    """Every --log-interval updates."""
    return line("train_inner", step, loss=loss, nll_loss=nll, ppl=round(2**nll, 2), wps=1261.9)


def summary(source, step, loss, nll=1.0):
    """After an epoch (train) or a validation (valid)."""
    return line(source, step, loss=loss, nll_loss=nll, ppl=round(2**nll, 2), best_loss=3)


def fairseq_run(folder, *lines):
    folder.mkdir(parents=True)
    noise = f"recipe: x\n{START}fairseq_cli.train | {{'lr': [0.1], 'loss': 3}}\n{START}train | task: TranslationTask\n"
    (folder / "train.log").write_text(noise + "".join(lines), "utf-8")
    return folder


def cifar_run(folder, *errors):
    folder.mkdir(parents=True)
    records = [
        {"epoch": k, "iteration": 10 * k, "train_loss": 2.0 / k, "test_error": error}
        for k, error in enumerate(errors, 1)
    ]
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return folder


def draw(stem, *arguments):
    return analyze.main(["curves", "--output", str(stem), *map(str, arguments)])


def table(stem):
    """run -> curve -> [(step, value)], read from the CSV; seeds one after the other."""
    found = {}
    with open(f"{stem}.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            point = (int(row["step"]), float(row["value"]))
            found.setdefault(row["run"], {}).setdefault(row["curve"], []).append(point)
    return found


def test_fairseq_logs_come_back_number_by_number(tmp_path, capfd):
    lines = [
        inner(100, 10.5, 9.25),
        summary("valid", 150, 8.5, 7.0),
        inner(200, 7.25, 6.0),
        summary("train", 251, 8.0, 7),
    ]
    fairseq_run(tmp_path / "một lần", *lines)
    fairseq_run(tmp_path / "two", inner(100, "nan"), summary("valid", 150, 9, 3))
    stem = tmp_path / "hình" / "đường"
    assert draw(stem, f"2rSkip+LN={tmp_path / 'một lần'}", tmp_path / "two") == 0
    said, error = capfd.readouterr()
    assert error == "" and [line.split() for line in said.splitlines()[1:3]] == [
        ["2rSkip+LN", "200", "10.5", "..", "7.25", "128", "..", "128"],
        ["two", "150", "nan", "..", "nan", "8", "..", "8"],
    ]
    assert table(stem)["2rSkip+LN"] == {
        "train_inner_loss": [(100, 10.5), (200, 7.25)],
        "train_inner_nll_loss": [(100, 9.25), (200, 6.0)],
        "train_inner_ppl": [(100, 608.87), (200, 64.0)],
        "valid_loss": [(150, 8.5)],
        "valid_nll_loss": [(150, 7.0)],
        "valid_ppl": [(150, 128.0)],
        "train_loss": [(251, 8.0)],
        "train_nll_loss": [(251, 7.0)],
        "train_ppl": [(251, 128.0)],
    }
    assert (stem.parent / "đường.png").read_bytes()[:4] == b"\x89PNG"
    assert (stem.parent / "đường.pdf").read_bytes()[:4] == b"%PDF"


def curves_of(folder, *lines):
    """The curves that are read of a log of these lines, step -> value."""
    return curves.read_log(fairseq_run(folder, *lines) / "train.log", curves.KINDS[1])


def test_a_resumed_run_keeps_the_last_of_what_it_repeats(tmp_path):
    lines = [inner(20, 9), inner(40, 8), summary("valid", 40, 7), inner(60, 6), summary("valid", 60, 5), inner(80, 4)]
    resumed = [inner(60, 6.5), summary("valid", 60, 5.5), summary("valid", 60, 5.25)]
    found = curves_of(tmp_path / "run", *lines, *resumed)
    assert found["train_inner_loss"] == {20: 9, 40: 8, 60: 6.5}  # 80 is still to be repeated
    assert found["valid_loss"] == {40: 7, 60: 5.25}


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path):
    """At the log's end, and where a resumed run wrote on behind it."""
    first, whole, last = inner(20, 9), inner(40, 8), inner(60, 7)
    for end in ("", "recipe: multi30k-en-de\n" + last):
        curve = curves_of(tmp_path / f"run {len(end)}", first, whole[:-9] + end)["train_inner_loss"]
        assert curve == {20: 9, 60: 7} if end else {20: 9}


def test_what_every_log_has_is_drawn(tmp_path):
    whole = fairseq_run(tmp_path / "a", inner(20, 9), summary("train", 30, 8), summary("valid", 30, 7))
    short = fairseq_run(tmp_path / "b", summary("train", 5, 8))  # fewer updates than --log-interval
    for runs, names in (
        ([whole], ["train_inner_loss", "valid_ppl"]),
        ([whole, short], ["train_loss", "valid_ppl"]),
        ([short], ["train_loss"]),
    ):
        assert list(curves.shown(*curves.read([str(run) for run in runs], 0))) == names


def test_cifar_seeds_share_a_label(tmp_path, capfd):
    for seed, errors in (("seed1", [50, 30, 20]), ("seed2", [55, 33]), ("seed10", [60])):
        cifar_run(tmp_path / "đồ thị" / seed, *errors)
    with open(tmp_path / "đồ thị" / "seed2" / "log.jsonl", "a", encoding="utf-8") as log:
        log.write('{"iteration": 30, "tra')  # what a kill leaves
    runs = [f"one={cifar_run(tmp_path / name, 40, 50)}" for name in "bc"]
    assert draw(tmp_path / "x", tmp_path / "đồ thị", *runs, "--first", 20) == 0
    assert table(tmp_path / "x") == {
        "đồ thị": {
            "train_loss": [(20, 1), (30, 2 / 3), (20, 1)],
            "test_error": [(20, 30), (30, 20), (20, 33)],
        },
        "one": {"train_loss": [(20, 1), (20, 1)], "test_error": [(20, 50), (20, 50)]},
    }
    assert [line.split()[-7:] for line in capfd.readouterr().out.splitlines()[1:3]] == [
        "30 1 .. 0.6667 30 .. 20".split(),
        "20 1 .. 1 33 .. 33".split(),
    ]


def test_what_cannot_be_drawn_is_one_line(tmp_path, capfd):
    cifar, fairseq = cifar_run(tmp_path / "cifar", 50), fairseq_run(tmp_path / "fairseq", inner(20, 9))
    for name, content in (("binary", b"\xff\xfe\x00log\n"), ("number", b"7\n")):
        cifar_run(tmp_path / name)
        (tmp_path / name / "log.jsonl").write_bytes(content)
    (tmp_path / "empty").mkdir()
    silent = fairseq_run(tmp_path / "silent")
    expected = "holds no log: expected log.jsonl of train_cifar.py or train.log of fairseq-train"
    for runs, message in (
        ([tmp_path / "empty"], f"{tmp_path}/empty {expected}"),
        ([tmp_path / "no"], f"{tmp_path}/no does not exist"),
        ([tmp_path / "binary"], f"{tmp_path}/binary/log.jsonl is not a log of train_cifar.py"),
        ([tmp_path / "number"], f"{tmp_path}/number/log.jsonl is not a log of train_cifar.py"),
        ([cifar, cifar], f"two runs are called cifar: say LABEL={cifar}; runs of one LABEL are its seeds"),
        ([cifar, fairseq], "these are runs of train_cifar.py and of fairseq-train: draw them in two figures"),
        ([cifar, "--first", 11], "there is nothing to draw: no run has logged anything from 11 on"),
    ):
        assert draw(tmp_path / "x", *runs) == 1
        assert error_line(capfd.readouterr().err).startswith(message)
    assert draw(tmp_path / "x", silent) == 1
    assert capfd.readouterr().err.splitlines()[1] == "error: there is nothing to draw: no run has logged anything"
    assert not list(tmp_path.glob("x.*"))


def test_every_run_has_its_own_colour_and_seeds_are_thin_beside_their_mean(tmp_path):
    for run in range(10):
        for seed in (1, 2):
            cifar_run(tmp_path / str(run) / f"seed{seed}", *[50 + run + seed] * (1 + seed))
    kind, logs = curves.read([str(tmp_path / str(run)) for run in range(10)], 0)
    figure = curves.draw(logs, curves.shown(kind, logs), kind.step, spread=())
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [str(run) for run in range(10)]
    lines = figure.axes[1].get_lines()
    assert len({line.get_color() for line in lines}) == 10
    points = [dict(zip(line.get_xdata(), line.get_ydata())) for line in lines[:3]]
    assert points == [{10: 51.5, 20: 51.5}, {10: 51, 20: 51}, {10: 52, 20: 52, 30: 52}]
    assert lines[0].get_linewidth() > lines[1].get_linewidth() == lines[2].get_linewidth()
