"""A translation cell from a user's own table: trained by train.sh, killed, gone on with, scored by evaluate.sh."""

import dataclasses
import os
import re
import signal
from types import SimpleNamespace

import pytest
import sacrebleu
from evaluation_corpus import prepare
from reproduce_helpers import (
    alive,
    descendants,
    error_line,
    read,
    reproduce,
    reproduce_process,
    start,
    wait_until,
    write_table,
)

from fairseq_rskip.tools.reproduce import runs, translation

pytestmark = pytest.mark.slow
OPTIONS = {
    **{f"{side}-{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention-heads")},
    **{f"{side}-embed-dim": 16 for side in ("encoder", "decoder")},
    **{f"{side}-ffn-embed-dim": 16 for side in ("encoder", "decoder")},
    **{"max-update": 120, "warmup-updates": 10, "max-tokens": 400, "update-freq": 1, "lr": 0.01},
}
ROW = {"label": "2rSkip+LN", "arch": "transformer_rskip_ln_iwslt_en_vi", "options": {"skip-lambda": 2}}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The prepared corpus, the table that has it as its data, and an output."""
    folder = tmp_path_factory.mktemp("dịch")
    data = prepare(folder / "ngữ liệu")
    table = {"task": "translation", "metric": "sacreBLEU intl", "data": str(data), "seeds": [5], "baseline": ""}
    tables = write_table(folder / "my tables", "mine", rows=[{**ROW, "reported": 31.45}], options=OPTIONS, **table)
    options = ("--experiments", tables, "--output", folder / "đầu ra")
    return SimpleNamespace(data=data, options=options, output=folder / "đầu ra", home=folder)


@pytest.fixture(scope="module")
def killed(place):
    """The run's folder, where training was killed, and what began it, when the first checkpoints were there."""
    process = start("run", "mine", "--scale", "0.5", *place.options, home=place.home)
    wait_until(lambda: len(list(place.output.glob("runs/*/seed5/checkpoints/checkpoint_*_*.pt"))) > 1, process)
    started = descendants(process.pid)
    process.kill()
    process.communicate()
    for pid in started:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, started)))
    (folder,) = place.output.glob("runs/*/seed5")
    return folder


def test_a_killed_training_is_shown_as_stopped(place, killed, capfd):
    _, out, _ = reproduce(capfd, "status", *place.options)
    assert re.search(r"2rSkip\+LN, seed 5: stopped \d+ %", out)
    assert not (killed / "evaluation").exists()


@pytest.fixture(scope="module")
def finished(place, killed):
    done = reproduce_process("run", "mine", "--scale", "0.5", *place.options, home=place.home)
    assert done.returncode == 0, done.stderr + (killed / "log.txt").read_text("utf-8")[-3000:]
    return killed


def test_the_same_command_goes_on_from_its_checkpoint(finished):
    log = (finished / "checkpoints" / "train.log").read_text("utf-8")
    (updates,) = re.findall(r"[Ll]oaded checkpoint .*checkpoint_last.pt .*@ (\d+) updates", log)
    assert 0 < int(updates) < 60
    assert len(read(finished / "run.json")["attempts"]) == 2
    assert re.findall(r"@ (\d+) updates", log)[-1] == "60"


def test_the_scores_are_sacrebleus_of_the_translations(place, finished):
    metrics = read(finished / "run.json")["metrics"]
    hypotheses = (finished / "evaluation" / "hyp.txt").read_text("utf-8").splitlines()
    references = (place.data / "raw" / "test.de").read_text("utf-8").splitlines()
    truth = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="intl").score
    assert len(hypotheses) == metrics["sentences"] == 33
    assert metrics["values"]["sacreBLEU intl"] == pytest.approx(truth, abs=1e-9)
    assert metrics["values"]["chrF"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [references]).score, abs=1e-9)
    log = (finished / "checkpoints" / "train.log").read_text("utf-8")
    losses = [float(text) for text in re.findall(r'"valid_loss": "([\d.]+)"', log)]
    values = metrics["values"]
    assert values["valid_loss"] == min(losses) <= values["last_valid_loss"] == losses[-1]
    unscored = dataclasses.replace(runs.load(finished).settings, scored=False)
    assert translation.metrics(unscored, finished)["values"] == {name: values[name] for name in translation.LOSSES}
    assert "tok:intl" in metrics["signatures"]["sacreBLEU intl"] and "average" in metrics["weights"]


def test_it_is_done_once(place, finished, capfd):
    status, out, _ = reproduce(capfd, "run", "mine", "--scale", "0.5", *place.options)
    assert status == 0 and re.fullmatch(r"done already .*-60-.*/seed5\n", out)
    value = read(finished / "run.json")["metrics"]["values"]["sacreBLEU intl"]
    _, out, _ = reproduce(capfd, "status", *place.options)
    assert f"2rSkip+LN, seed 5: done  sacreBLEU intl {value:.2f}" in out and "(not as the table's file has it)" in out


def test_results_stay_where_the_data_has_gone(place, finished, capfd):
    place.data.rename(place.data.with_name("elsewhere"))
    try:
        status, out, _ = reproduce(capfd, "status", *place.options)
        assert status == 0 and "seed 5: done" in out
        status, _, error = reproduce(capfd, "run", "mine", "--scale", "0.5", *place.options)
        assert status == 1 and "is no prepared folder" in error_line(error)
    finally:
        place.data.with_name("elsewhere").rename(place.data)
