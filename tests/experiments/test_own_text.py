"""Text that ``rskip run`` prepares first: taken as it is, waited for, trained on, refused."""

import json

import pytest
import text_corpus
from evaluation_corpus import follow_in_server
from experiment_runs import reproduce, tables, write

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import locked, write_json
from fairseq_rskip.tools import process
from fairseq_rskip.tools import reproduce as reproduce_module
from fairseq_rskip.tools.__main__ import main as rskip
from fairseq_rskip.tools.evaluate import generation
from fairseq_rskip.tools.experiments import execution, own_text, results
from fairseq_rskip.tools.experiments.records import Table
from fairseq_rskip.tools.experiments.run_folder import measured, read_record
from fairseq_rskip.tools.reproduce import prepare_data


@pytest.mark.parametrize(
    ("corpus", "options", "same"),
    [("multi30k-en-de", {"bpe-size": 10}, True), ("multi30k-en-fr", {"bpe-size": 10}, False),
     ("multi30k-en-de", {"bpe-size": 20}, False), ("multi30k-en-de", {"max-ratio": 2.0}, False)],
    ids=["same", "corpus", "size", "filter"],
)  # fmt: skip
def test_a_published_corpus_in_a_folder_is_taken_if_it_was_prepared_so(
    tmp_path, corpus, options, same
):
    """Perhaps not by ``rskip run``: without network ``rskip prepare`` takes its archives."""
    folder = tmp_path / "mine"
    prepared = Table.Published(corpus="multi30k-en-de", options={"bpe-size": 10})
    facts = own_text.facts(prepared, str(folder))
    (folder / "data-bin").mkdir(parents=True)
    write_json(folder / "data-bin" / "preparation.json", {**facts, "splits": {}})
    text = Table.Published(corpus=corpus, folder=str(folder), options=options)
    if same:
        assert reproduce_module._own_text_words(text, str(folder)) == []
    else:
        with pytest.raises(UserError, match="prepared from other text"):
            reproduce_module._own_text_words(text, str(folder))


def test_another_process_waits_while_own_text_is_prepared(tmp_path, monkeypatch):
    """Its inputs.json would say of what text the data-bin of the first is."""
    text_corpus.write_text(tmp_path / "text")
    data = {"text": str(tmp_path / "text"), "folder": str(tmp_path / "data")}
    rows = [{"label": "2rSkip", "arch": "transformer_lm_rskip_ln_tiny"}]
    (table,) = tables(write(tmp_path, {"data": data, "rows": rows}))
    was_held = []

    def prepares(command, show):
        with locked(tmp_path / "data", reproduce_module.INPUTS_LOCK) as file:
            was_held.append(file is None)
        return 0

    monkeypatch.setattr(reproduce_module, "follow", prepares)
    assert prepare_data(table) and was_held == [True]


@pytest.mark.slow
def test_a_language_model_of_ones_own_text_is_prepared_trained_and_scored(
    tmp_path, monkeypatch, capfd
):
    """The evaluation in this process, its fairseq-eval-lm in fairseq's server."""
    text_corpus.write_text(tmp_path / "text")
    options = {"held-out": 0.1, "bpe": "none", "tokenizer": "none", "workers": 1}
    data = {"text": str(tmp_path / "text"), "folder": str(tmp_path / "data"), "options": options}
    options = {
        "max-update": 20,
        "warmup-updates": 5,
        "max-tokens": 512,
        "tokens-per-sample": 32,
        "cpu": True,
    }
    rows = [{"label": "2rSkip", "arch": "transformer_lm_rskip_ln_tiny"}]
    path = write(
        tmp_path, {"data": data, "options": options, "also": ["bits per byte"], "rows": rows}
    )
    status, printed, _ = reproduce(capfd, "run", path, "--dry-run")
    assert status == 0 and f" --workers 1 --text {tmp_path}/text {tmp_path}/data" in printed
    (table,) = tables(path)
    assert prepare_data(table) and "data-bin" in capfd.readouterr().out
    assert not prepare_data(table) and not capfd.readouterr().out
    (tmp_path / "text").write_text("another text")
    with pytest.raises(UserError, match="prepared from other text"):
        prepare_data(table)

    real = process.follow
    monkeypatch.setattr(generation, "follow", follow_in_server)
    monkeypatch.setattr(
        process, "follow", lambda c, *a, **o: rskip(c[3:]) if "evaluate" in c else real(c, *a, **o)
    )
    (run,) = results.ready(tables(path)[0], tmp_path / "out")
    execution.prepare(run)
    assert execution.execute(run.folder) and results.state(run).kind == "done"
    scores = json.loads((run.folder / "evaluation" / "scores.json").read_text())
    values = measured(run, read_record(run.folder))["values"]
    assert (values["perplexity"], values["bits per byte"]) == (
        scores["perplexity"]["subword"],
        scores["bits"]["byte"],
    )
    assert values["perplexity"] < 30 and "valid_loss" in values


@pytest.mark.parametrize(
    ("task", "data", "arch", "says"),
    [
        (
            "language-model",
            "multi30k-en-de",
            "transformer_tiny",
            "transformer_tiny is a translation model: the task of this table is language-model",
        ),
        (
            "",
            "multi30k-en-de",
            "transformer_lm",
            "multi30k-en-de has two languages: expected a transl",
        ),
        (
            "translation",
            "wikitext103",
            "transformer_lm",
            "transformer_lm is a language model: the task of this table is translation",
        ),
    ],
)
def test_a_task_of_other_data_is_one_line(task, data, arch, says, tmp_path, capfd):
    path = write(tmp_path, {"task": task, "data": data, "rows": [{"label": "x", "arch": arch}]})
    status, _, error = reproduce(capfd, "run", path, "--dry-run")
    assert status == 1 and says in error and len(error.splitlines()) == 1
