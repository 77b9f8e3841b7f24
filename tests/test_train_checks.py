"""What scripts/train.sh finds out before fairseq-train starts: held-out lengths, languages, models that cannot be."""

import json

import pytest
from training_corpus import lengthen, planner, prepare, refused

from fairseq_rskip.tools.train.main import prepare as prepare_training

SKIP = "--skip-invalid-size-inputs-valid-test"
TINY = "transformer_rskip_ln_tiny"


@pytest.fixture
def plan(capsys):
    return planner(capsys)


@pytest.fixture
def data(tiny_corpus, tmp_path):
    return prepare(tiny_corpus, tmp_path)


@pytest.fixture
def long_data(data):
    """Its tenth held-out sentence has 3,001 tokens; fairseq's Transformers take 1,024."""
    lengthen(data / "data-bin" / "valid.src-tgt.src", 10, 3001)
    return data


def test_validation_leaves_out_what_the_model_does_not_take_and_says_so(plan, long_data):
    made = plan(long_data, TINY, "--dry-run")
    assert made.args.skip_invalid_size_inputs_valid_test
    assert "1 of 60" in made.err and "sentence 10: 3001 tokens, --max-source-positions 1024" in made.err


@pytest.mark.parametrize(
    ("given", "room"),
    [
        ("--max-source-positions 4096", 4096),
        ("--max-source-positions 4096 --max-tokens 600", 3001),
        ("--max-source-positions 3001 --max-tokens 600 --max-tokens-valid 3001", 3001),
        ("--truncate-source", 4096),
        ("--truncate-source --max-tokens-valid 1024", 1024),
        ("--disable-validation", 4096),
    ],
)
def test_validation_keeps_what_fits_and_its_batches_have_room(plan, long_data, given, room):
    made = plan(long_data, TINY, "--dry-run", *given.split())
    assert SKIP not in made.words and "leaves out" not in made.err
    assert int(made.args.max_tokens_valid) == room


def test_a_target_counts_too_and_short_sentences_change_nothing(plan, data):
    assert SKIP not in plan(data, TINY, "--dry-run").words
    lengthen(data / "data-bin" / "valid.src-tgt.tgt", 60, 1024)
    assert SKIP not in plan(data, TINY, "--dry-run").words
    lengthen(data / "data-bin" / "valid.src-tgt.tgt", 60, 1025)
    made = plan(data, TINY, "--dry-run")
    assert SKIP in made.words and "sentence 60: 1025 tokens, --max-target-positions 1024" in made.err


def test_held_out_sentences_of_no_use_are_refused(plan, long_data):
    refused(plan(long_data, TINY, "--dry-run", "--max-source-positions", 2), "every sentence of valid", "positions 2")
    given = ["--max-source-positions", 4096, "--max-tokens-valid", 100]
    refused(plan(long_data, TINY, "--dry-run", *given), "--max-tokens-valid 100", "3001")
    (long_data / "data-bin" / "valid.src-tgt.src.idx").write_bytes(b"broken")
    refused(plan(long_data, TINY, "--dry-run"), "cannot read", "valid.src-tgt.src.idx")


def test_the_languages_of_preparation_json_are_passed_on(plan, data):
    words = plan(data, TINY, "--dry-run").words
    assert (words[words.index("--source-lang") + 1], words[words.index("--target-lang") + 1]) == ("src", "tgt")
    words = plan(data, TINY, "--dry-run", "--source-lang", "src").words
    assert words.count("--source-lang") == words.count("--target-lang") == 1
    (data / "data-bin" / "preparation.json").unlink()
    assert "--source-lang" not in plan(data, TINY, "--dry-run").words


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("transformer_rskip_ln --skip-lambda 2.5", ["--skip-lambda 2.5", "expected an integer from 1"]),
        ("transformer_rskip_ln --skip-norm none", ["--skip-kind rskip", "--skip-norm none"]),
        ("transformer_wskip --skip-lambda 2", ["leave --skip-lambda at 1"]),
        ("transformer_xskip_ln --encoder-normalize-before", ["--encoder-normalize-before", "--skip-norm none"]),
        (
            "transformer_rskip_ln --encoder-attention-heads 3",
            ["--encoder-attention-heads 3", "--encoder-embed-dim 512"],
        ),
        ("transformer_rskip_ln --encoder-embed-dim 36", ["--encoder-attention-heads 8", "--encoder-embed-dim 36"]),
        ("transformer --decoder-attention-heads 7", ["--decoder-attention-heads 7", "--decoder-embed-dim 512"]),
    ],
)
def test_a_model_that_cannot_be_built_is_one_line_and_leaves_nothing(plan, data, tmp_path, argv, parts):
    refused(plan(data, *argv.split(), "--save-dir", tmp_path / "save"), *parts)
    assert not (tmp_path / "save").exists()


def test_another_shape_is_refused_where_checkpoints_are(plan, data, tmp_path, capsys):
    save = tmp_path / "save"
    same = ["--save-dir", save, "--encoder-layers", 3]
    assert prepare_training([str(word) for word in [data, TINY, *same]])[:2] == ["--save", str(save)]
    capsys.readouterr()
    written = json.loads((save / "training.json").read_text("utf-8"))
    assert (written["encoder_layers"], written["decoder_embed_dim"], written["skip_lambda"]) == (3, 64, 2.0)
    (save / "checkpoint1.pt").touch()
    assert plan(data, TINY, "--dry-run", *same).status == 0
    refused(plan(data, TINY, "--save-dir", save), "encoder_layers = 3, not 2", "--save-dir")
    given = ["--encoder-embed-dim", 128, "--decoder-embed-dim", 128]
    refused(plan(data, TINY, *same, *given), "encoder_embed_dim = 64, not 128")
