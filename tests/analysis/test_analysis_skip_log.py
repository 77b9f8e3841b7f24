"""What the reader of a skip log gives back, and what it refuses."""

import math

import pytest

from fairseq_rskip.analysis import skip_log
from fairseq_rskip.analysis.skip_log import by_block, gradient_ratio
from fairseq_rskip.errors import UserError

TOP, BOTTOM = "decoder.layers.1.final_skip", "decoder.layers.0.self_attn_skip"


def test_what_is_written_is_read_by_update_quantity_and_block(tmp_path):
    written = {
        10: {f"skip_grad_norm/{BOTTOM}": 0.5, f"skip_grad_norm/{TOP}": 2.0, "skip_lambda/a": 3.0},
        20: {f"skip_grad_norm/{BOTTOM}": 0.0, f"skip_grad_norm/{TOP}": 1.0},
    }
    lines = skip_log.SkipLines(tmp_path, first=1)
    for step, values in written.items():
        lines.write(step, values)
    updates = skip_log.read(tmp_path / "skips.jsonl")
    assert updates == written
    assert by_block(updates[10], skip_log.GRAD_NORM) == {BOTTOM: 0.5, TOP: 2.0}
    assert by_block(updates[20], skip_log.LAMBDA) == {}
    assert gradient_ratio(updates[10], TOP, BOTTOM) == 4
    assert gradient_ratio(updates[20], TOP, BOTTOM) == math.inf


def test_the_logs_of_a_folder_are_in_the_order_of_their_seeds(tmp_path):
    for seed in (10, 2):
        (tmp_path / f"seed{seed}").mkdir()
        skip_log.SkipLines(tmp_path / f"seed{seed}", first=1).write(1, {})
    assert [log.parent.name for log in skip_log.logs_below(tmp_path)] == ["seed2", "seed10"]


@pytest.mark.parametrize("text", ["no JSON\n", '{"iteration": 1}\n', "[1]\n"])
def test_a_file_that_is_no_skip_log_is_refused(tmp_path, text):
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=r"log.jsonl is not a skip log: expected the skips.jsonl"):
        skip_log.read(path)


def test_a_resumed_training_replaces_the_lines_of_the_updates_that_it_repeats(tmp_path):
    """It resumes behind update 10, and may have another interval."""
    lines = skip_log.SkipLines(tmp_path, first=1)
    for step in (10, 20, 30):
        lines.write(step, {"skip_lambda/a": 1.0})
    resumed = skip_log.SkipLines(tmp_path, first=20)
    assert list(skip_log.read(tmp_path / "skips.jsonl")) == [10]
    resumed.write(25, {"skip_lambda/a": 2.0})
    assert list(skip_log.read(tmp_path / "skips.jsonl")) == [10, 25]
