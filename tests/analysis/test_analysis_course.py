"""rskip analyze course: what --skip-log-interval logged, block by block, becomes one line a run."""

import csv

from fairseq_rskip.analysis.live import SkipLines
from fairseq_rskip.tools.analyze import main


def log(folder, values):
    """``values``: (tag, step) -> value, as a training logs them."""
    folder.mkdir(parents=True)
    lines = SkipLines(folder, 1)
    for step in sorted({step for _, step in values}):
        lines.write(step, {tag: value for (tag, at), value in values.items() if at == step})


def test_a_line_is_the_geometric_mean_over_blocks_and_seeds(tmp_path, capsys):
    first = {
        ("skip_F_over_x/a", 10): 1.0,
        ("skip_F_over_x/b", 10): 4.0,
        ("skip_F_over_x/a", 20): 9.0,
        ("loss", 10): 3.0,
    }
    log(tmp_path / "one" / "tensorboard" / "skip", first)
    log(tmp_path / "two", {("skip_F_over_x/a", 10): 16.0, ("skip_lambda/a", 10): 2.5, ("skip_F_over_x/b", 10): 0.0})
    stem = tmp_path / "course"
    arguments = ["course", f"2rSkip={tmp_path / 'one'}", f"2rSkip={tmp_path / 'two'}", "--output", str(stem)]
    assert main(arguments) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("2rSkip")]
    assert line.split()[1:] == [
        "20",
        "4",
        "..",
        "9",
        "2.5",
        "..",
        "2.5",
    ]  # (1 * 4 * 16) ** (1/3): what is 0 has no logarithm
    with open(f"{stem}.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and {row["seed"] for row in rows} == {"1", "2"}
    assert stem.with_suffix(".png").stat().st_size > 10_000


def test_by_block_a_line_is_the_last_update_against_depth(tmp_path, capsys):
    tag = "skip_grad_norm/encoder.layers.{}.final_skip".format
    values = {(tag(layer), step): step * 10.0**-layer for layer in (0, 1, 2) for step in (10, 20)}
    log(tmp_path / "one", values)
    log(tmp_path / "two", {key: 4 * value for key, value in values.items()})
    runs = [f"deep={tmp_path / name}" for name in ("one", "two")]
    assert main(["course", "--by-block", *runs, "--output", str(tmp_path / "depth")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("deep")]
    assert line.split()[1:] == ["3", "40", "..", "0.4"]  # sqrt(20 * 80), of block 1; of block 3 a hundredth
    with open(tmp_path / "depth.csv", encoding="utf-8") as file:
        assert [(row["seed"], row["number"], row["step"]) for row in csv.DictReader(file)] == [
            (seed, number, "20") for seed in "12" for number in "123"
        ]


def test_a_training_that_logged_no_skips_and_a_folder_that_is_not_there_get_one_line(tmp_path, capsys):
    log(tmp_path / "plain", {("loss", 10): 3.0})
    for folder in ("plain", "nowhere"):
        assert main(["course", str(tmp_path / folder), "--output", str(tmp_path / "course")]) == 1
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith(f"error: {tmp_path / folder} has no skips.jsonl: expected a training with")
    assert not (tmp_path / "course.png").exists()
