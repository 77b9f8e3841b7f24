"""The patched fairseq does what fairseq does: its own commands, with the stock ``transformer``."""

import json
import re
import shlex

import pytest
from conftest import SIZES, run_checked

from fairseq_rskip.tools import average

pytestmark = pytest.mark.slow

MODEL = shlex.split(
    "--arch transformer --share-all-embeddings --encoder-layers 1 --decoder-layers 1 "
    "--encoder-attention-heads 2 --decoder-attention-heads 2 --encoder-embed-dim 32 "
    "--decoder-embed-dim 32 --encoder-ffn-embed-dim 64 "
    "--decoder-ffn-embed-dim 64 --dropout 0.1"
)
TRAINING = shlex.split(
    "--optimizer adam --lr 0.005 --lr-scheduler inverse_sqrt --warmup-updates 20 --criterion "
    "label_smoothed_cross_entropy --label-smoothing 0.1 --max-tokens 400 --seed 7 --cpu "
    "--num-workers 0 "
    "--log-format json --no-progress-bar --log-interval 1000"
)
WITH_BLEU = ["--max-epoch", "6", "--eval-bleu", "--eval-bleu-args", '{"beam": 2, "max_len_b": 10}']
ADVICE = re.compile(r"Warning|deprecat", re.IGNORECASE)


def train(corpus, save_dir, *options):
    return run_checked(
        ["fairseq-train", corpus, *MODEL, *TRAINING, "--save-dir", save_dir, *options]
    )


def logged(text, key):
    """Every value of ``key`` in the JSON lines of a log, as floats."""
    records = (json.loads(actual) for actual in re.findall(r"\{\"epoch\".*\}", text))
    return [float(record[key]) for record in records if key in record]


@pytest.fixture(scope="module")
def trained(tiny_corpus, tmp_path_factory):
    """Return (directory, log) of six epochs without interruption.

    They have BLEU: numpy arrays enter the checkpoint with it.
    """
    save_dir = tmp_path_factory.mktemp("stock")
    return save_dir, train(tiny_corpus, save_dir, *WITH_BLEU)


def checkpoint(trained):
    return trained[0] / "checkpoint_last.pt"


def test_train_lowers_the_held_out_loss_and_gives_no_advice(trained):
    losses = logged(trained[1], "valid_loss")
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.2
    assert not ADVICE.search(trained[1])


def test_a_resumed_run_equals_the_uninterrupted_one(tiny_corpus, trained, tmp_path):
    log = train(tiny_corpus, tmp_path, *WITH_BLEU, "--restore-file", trained[0] / "checkpoint4.pt")
    assert "Loaded checkpoint" in log
    assert logged(log, "valid_loss") == logged(trained[1], "valid_loss")[4:]


def hypotheses(text):
    """Sentence number -> hypothesis."""
    return {
        int(number): words
        for number, words in re.findall(r"^H-(\d+)\t\S+\t(.*)$", text, re.MULTILINE)
    }


@pytest.fixture(scope="module")
def generated(tiny_corpus, trained):
    command = [
        "fairseq-generate",
        tiny_corpus,
        "--path",
        checkpoint(trained),
        "--cpu",
        "--beam",
        "4",
    ]
    return run_checked([*command, "--max-len-b", "10"])


def test_generate_translates_every_sentence(generated):
    actual = hypotheses(generated)
    assert sorted(actual) == list(range(SIZES["test"]))
    assert all(actual.values())
    assert not ADVICE.search(generated)


def test_interactive_and_from_pretrained_agree_with_generate(
    tiny_corpus, raw_corpus, trained, generated
):
    sources = (raw_corpus / "test.src").read_text(encoding="utf-8").splitlines()[:5]
    command = [
        "fairseq-interactive",
        tiny_corpus,
        "--path",
        checkpoint(trained),
        "--cpu",
        "--beam",
        "4",
    ]
    options = ["--max-len-b", "10", "--source-lang", "src", "--target-lang", "tgt"]
    text = run_checked([*command, *options], input="".join(line + "\n" for line in sources))
    expected = [hypotheses(generated)[number] for number in range(5)]
    assert [hypotheses(text)[number] for number in range(5)] == expected
    program = (
        "import json, sys; from fairseq.models.transformer import TransformerModel as M;"
        "m = M.from_pretrained(*sys.argv[2:5]);"
        "print('RESULT' + json.dumps(m.translate(json.loads(sys.argv[5]), beam=4, max_len_b=10)))"
    )
    place = checkpoint(trained)
    text = run_checked(
        ["python-with-fairseq", program, place.parent, place.name, tiny_corpus, json.dumps(sources)]
    )
    assert json.loads(text.split("RESULT")[1].splitlines()[0]) == expected


def test_batches_in_buckets(tiny_corpus, tmp_path):
    """``--num-batch-buckets`` asks numpy for percentiles by an argument that numpy has renamed."""
    options = (
        "--arch transformer_tiny --optimizer adam --max-tokens 400 --max-update 1 "
        "--num-batch-buckets 2 --cpu"
    )
    command = [
        "fairseq-train",
        tiny_corpus,
        *options.split(),
        "--disable-validation",
        "--save-dir",
        tmp_path,
    ]
    assert "bucketing source lengths" in run_checked(command)


def test_an_averaged_checkpoint_generates(tiny_corpus, trained, tmp_path):
    averaged = tmp_path / "averaged.pt"
    options = ["--inputs", trained[0], "--last", "3", "--output", averaged]
    average.main([str(option) for option in options])
    text = run_checked(
        ["fairseq-generate", tiny_corpus, "--path", averaged, "--cpu", "--max-len-b", "10"]
    )
    assert len(hypotheses(text)) == SIZES["test"]
