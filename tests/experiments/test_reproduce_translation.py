"""``rskip run`` from a user's own text to the report: prepared, trained by train.sh, killed, resumed, evaluated."""

import dataclasses
import os
import random
import re
import signal
import sys
from types import SimpleNamespace

import pytest
import sacrebleu
import yaml
from conftest import run_command
from evaluation_corpus import SIZES, sentence, write
from reproduce_helpers import alive, descendants, error_line, read, reproduce, start, wait_until

from fairseq_rskip.tools.reproduce import experiment, runs, translation

pytestmark = pytest.mark.slow
RSKIP = ("-m", "fairseq_rskip.tools")
MODEL = {
    **{f"{side}-{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention-heads")},
    **{f"{side}-embed-dim": 16 for side in ("encoder", "decoder")},
    **{f"{side}-ffn-embed-dim": 16 for side in ("encoder", "decoder")},
    **{"max-update": 60, "warmup-updates": 10, "max-tokens": 400, "update-freq": 1, "lr": 0.01},
    **{"save-interval-updates": 15, "keep-interval-updates": 3, "no-epoch-checkpoints": True},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Plain text in two languages, and a file that describes one experiment on it."""
    home = tmp_path_factory.mktemp("dịch")
    rng, files = random.Random(7), {}
    for split, size in SIZES.items():
        files[split] = [str(home / f"{split} {language}.txt") for language in ("en", "de")]
        for path, lines in zip(files[split], zip(*(sentence(rng) for _ in range(size)))):
            write(home / path, lines)
    data = {"source": "en", "target": "de", **files, "folder": str(home / "ngữ liệu")}
    data["options"] = {"bpe-size": 120, "max-ratio": 3, "workers": 1}
    about = {"label": "2rSkip+LN", "arch": "transformer_rskip_ln_tiny", "seeds": [5], "data": data}
    about.update(options={**MODEL, "skip-lambda": 2}, evaluate={"beam": 2, "average": 2}, metric="sacreBLEU intl")
    (home / "mine.yaml").write_text(yaml.safe_dump(about, allow_unicode=True), "utf-8")
    return SimpleNamespace(home=home, about=about, output=home / "đầu ra", data=home / "ngữ liệu" / "data-bin")


def words(place):
    return ["run", place.home / "mine.yaml", "--output", place.output]


@pytest.fixture(scope="module")
def killed(place):
    """The run's folder, where training was killed, and what began it, when there was a checkpoint."""
    process = start(*words(place), home=place.home, program=RSKIP)
    wait_until(lambda: list(place.output.glob("runs/*/seed5/checkpoints/checkpoint_*_*.pt")), process)
    started = descendants(process.pid)
    process.kill()
    out, _ = process.communicate()
    for pid in started:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, started)))
    (folder,) = place.output.glob("runs/*/seed5")
    return SimpleNamespace(folder=folder, out=out)


def test_the_text_is_prepared_and_the_killed_training_shown_as_stopped(place, killed, capfd):
    lines = killed.out.splitlines()
    assert "prepare-corpus.sh --src en --tgt de --train-src" in lines[0] and "--bpe-size 120" in lines[0]
    assert any("train.sh" in line and "transformer_rskip_ln_tiny" in line for line in lines)
    _, out, _ = reproduce(capfd, "status", "--output", place.output)
    assert re.search(r"2rSkip\+LN, seed 5: stopped \d+ %", out)
    assert not (killed.folder / "evaluation").exists()


@pytest.fixture(scope="module")
def finished(place, killed):
    done = run_command([sys.executable, *RSKIP, *words(place)], env={"HOME": str(place.home)})
    assert done.returncode == 0, done.stderr + (killed.folder / "log.txt").read_text("utf-8")[-3000:]
    return SimpleNamespace(folder=killed.folder, out=done.stdout)


def test_the_same_command_resumes_from_the_checkpoint_and_writes_the_report(place, finished):
    assert "prepare-corpus.sh" not in finished.out and "reproduce.py" not in finished.out
    log = (finished.folder / "checkpoints" / "train.log").read_text("utf-8")
    (updates,) = re.findall(r"[Ll]oaded checkpoint .*checkpoint_last.pt .*@ (\d+) updates", log)
    assert 0 < int(updates) < 60
    assert len(read(finished.folder / "run.json")["attempts"]) == 2
    assert re.findall(r"@ (\d+) updates", log)[-1] == "60"
    value = read(finished.folder / "run.json")["metrics"]["values"]["sacreBLEU intl"]
    assert f"2rSkip+LN, seed 5: done  sacreBLEU intl {value:.2f}" in finished.out
    report = (place.output / "report" / "report.md").read_text("utf-8")
    recipe = "recipe small: optimizer adam"  # its tokens and max-epoch are replaced
    for said in (f"{value:.2f}", "mine", "max-update 60", "beam 2", "skip-lambda 2", recipe):
        assert said in report, said


def test_the_scores_are_sacrebleus_of_the_translations(place, finished):
    metrics = read(finished.folder / "run.json")["metrics"]
    hypotheses = (finished.folder / "evaluation" / "hyp.txt").read_text("utf-8").splitlines()
    references = (place.data / "raw" / "test.de").read_text("utf-8").splitlines()
    truth = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="intl").score
    assert len(hypotheses) == metrics["sentences"] == 33
    assert metrics["values"]["sacreBLEU intl"] == pytest.approx(truth, abs=1e-9)
    assert metrics["values"]["chrF"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [references]).score, abs=1e-9)
    log = (finished.folder / "checkpoints" / "train.log").read_text("utf-8")
    losses = [float(text) for text in re.findall(r'"valid_loss": "([\d.]+)"', log)]
    values = metrics["values"]
    assert values["valid_loss"] == min(losses) <= values["last_valid_loss"] == losses[-1]
    part, told = translation.progress(runs.load(finished.folder).settings, finished.folder)
    assert part == 1 and re.fullmatch(rf"train loss \d+\.\d+, valid loss {losses[-1]}, evaluating", told)
    unscored = dataclasses.replace(runs.load(finished.folder).settings, scored=False)
    found = translation.metrics(unscored, finished.folder)["values"]
    assert found == {name: values[name] for name in translation.LOSSES}
    assert "tok:intl" in metrics["signatures"]["sacreBLEU intl"] and "average of the last 2 " in metrics["weights"]


def test_what_is_done_is_done_once_and_its_folder_keeps_its_text(place, finished, capfd):
    argv = [str(word) for word in words(place)[1:]]
    assert experiment.main(argv) == 0
    assert re.match(r"done already .*-60-.*/seed5\n", capfd.readouterr().out)
    text = place.home / "train de.txt"
    before = text.read_bytes()
    text.write_bytes(before.replace(b"Haus", b"Heim"))
    assert experiment.main(argv) == 1
    assert "was prepared from other text, or with other options; give" in error_line(capfd.readouterr().err)
    text.write_bytes(before)
    place.data.parent.rename(place.home / "elsewhere")
    status, out, _ = reproduce(capfd, "status", "--output", place.output)
    assert status == 0 and "seed 5: done" in out
    status, _, error = reproduce(capfd, "run", place.home / "mine.yaml", "--output", place.output)
    assert status == 1 and "rskip run " in error_line(error) and "prepares it" in error
