"""``rskip train`` up to the training: the command that it makes, read by fairseq's own parser, and what it refuses."""

import pytest
import torch
from conftest import ROOT, run_command
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from training_corpus import planner, prepare, refused

from fairseq_rskip.tools.recipes import recipe_for
from fairseq_rskip.tools.train.main import main
from fairseq_rskip.tools.train.plan import find_gpus

SCRIPT = ROOT / "scripts" / "train.sh"
TINY = "transformer_rskip_ln_tiny"
WMT = f"wmt14-en-de {TINY}"

# corpus, architecture, tokens a step, updates, peak learning rate, dropout: the paper, section 4.1, and Vaswani et al.
PAPER = [
    ("iwslt15-en-vi", "transformer_rskip_ln_iwslt_en_vi", 4096, None, 7e-4, 0.1),
    ("iwslt15-en-vi", "transformer_rskip_ln_vaswani_wmt_en_de_big", 4096, None, 5e-4, 0.3),
    ("wmt14-en-de", "transformer_rskip_ln_wmt_en_de", 16384, 550000, 7e-4, 0.1),
    ("wmt14-en-de", "transformer_vaswani_wmt_en_de_big", 16384, 550000, 5e-4, 0.3),
    ("wmt14-en-fr", "transformer_xskip_ln_vaswani_wmt_en_fr_big", 16384, 550000, 5e-4, 0.1),
]


@pytest.fixture
def plan(capsys):
    return planner(capsys)


@pytest.fixture
def data(tiny_corpus, tmp_path):
    return prepare(tiny_corpus, tmp_path)


def step_of(args, processes):
    return args.max_tokens * args.update_freq[0] * processes


@pytest.mark.parametrize(("corpus", "arch", "tokens", "updates", "rate", "dropout"), PAPER)
def test_the_command_has_the_papers_settings(plan, corpus, arch, tokens, updates, rate, dropout):
    args = plan(corpus, arch, "--dry-run", "--gpus", 1).args
    cfg = convert_namespace_to_omegaconf(args)
    assert step_of(args, 1) == tokens
    assert cfg.optimization.lr == [rate]
    assert (cfg.optimizer._name, cfg.optimizer.adam_betas, cfg.optimizer.adam_eps) == ("adam", "(0.9, 0.98)", 1e-9)
    assert (cfg.lr_scheduler._name, cfg.lr_scheduler.warmup_updates) == ("inverse_sqrt", 4000)
    assert cfg.lr_scheduler.warmup_init_lr == 1e-7
    assert (cfg.criterion._name, cfg.criterion.label_smoothing) == ("label_smoothed_cross_entropy", 0.1)
    assert updates in (None, cfg.optimization.max_update)
    assert args.arch == arch
    assert (cfg.model.dropout, cfg.model.share_all_embeddings) == (dropout, True)
    assert not cfg.model.encoder_normalize_before


@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 8])
@pytest.mark.parametrize(("corpus", "tokens"), [("wmt14-en-de", 16384), ("multi30k-en-de", 2048)])
def test_a_step_has_the_papers_tokens_on_any_number_of_gpus(plan, corpus, tokens, gpus):
    made = plan(corpus, TINY, "--dry-run", "--gpus", gpus)
    args, processes = made.args, max(1, gpus)
    assert tokens - processes * args.update_freq[0] < step_of(args, processes) <= tokens
    assert args.max_tokens <= 4096 <= int(args.max_tokens_valid)
    assert f"= {step_of(args, processes)}; the recipe's: {tokens}" in made.err
    assert (args.fp16, args.cpu) == (gpus > 0, gpus == 0)
    assert ("slow" in made.err) == (gpus == 0)


@pytest.mark.parametrize(("dim", "rate"), [(64, 2e-3), (256, 1e-3), (512, 7e-4), (1024, 5e-4)])
def test_the_learning_rate_follows_a_dimension_that_the_user_gives(plan, dim, rate):
    given = ["--encoder-embed-dim", dim, "--decoder-embed-dim", dim]
    for arch in ("transformer_rskip_ln", "transformer"):
        assert plan("iwslt15-en-vi", arch, "--dry-run", *given).args.lr == [rate]


@pytest.mark.parametrize(
    ("given", "max_tokens", "update_freq"),
    [
        ("--max-tokens 1024", 1024, 8),
        ("--update-freq 1", 8192, 1),
        ("--batch-size 64 --update-freq 3", None, 3),
    ],
)
def test_a_batch_of_the_users_holds_and_the_rest_follows(plan, given, max_tokens, update_freq):
    args = plan("wmt14-en-de", "transformer", "--dry-run", "--gpus", 2, *given.split()).args
    assert (args.max_tokens, list(args.update_freq)) == (max_tokens, [update_freq])


def test_a_larger_gpu_takes_larger_batches(plan, monkeypatch):
    monkeypatch.setenv("MAX_TOKENS_PER_GPU", "16384")
    args = plan("wmt14-en-de", TINY, "--dry-run", "--gpus", 1).args
    assert (args.max_tokens, list(args.update_freq)) == (16384, [1])
    monkeypatch.setenv("MAX_TOKENS_PER_GPU", "4k")
    refused(plan("wmt14-en-de", TINY, "--dry-run", "--gpus", 1), "MAX_TOKENS_PER_GPU", "4k")


def test_the_users_options_win(plan):
    given = "--lr 0.01 --max-epoch 3 --optimizer sgd --save-dir /x/y --seed 7 --no-fp16".split()
    made = plan("iwslt15-en-vi", "transformer", "--dry-run", "--gpus", 1, *given)
    assert made.args.lr == [0.01]
    assert (made.args.max_epoch, made.args.max_update) == (3, 0)
    assert (made.args.optimizer, made.args.seed, made.args.fp16) == ("sgd", 7, False)
    assert made.args.save_dir == "/x/y"
    assert made.words[-len(given) + 1 :] == given[:-1]
    assert made.args.tensorboard_logdir == "/x/y/tensorboard"


@pytest.mark.parametrize("given", ["--amp", "--memory-efficient-fp16", "--bf16", "--cpu"])
def test_a_precision_of_the_users_is_left_alone(plan, given):
    """And the CPU of a machine with GPUs is one process; fairseq alone would start eight."""
    made = plan("wmt14-en-de", TINY, "--dry-run", "--gpus", 8, given)
    assert "--fp16" not in made.words and made.words.count(given) == 1
    if given == "--cpu":
        assert (made.args.distributed_world_size, step_of(made.args, 1)) == (1, 16384)


@pytest.mark.parametrize(
    ("given", "kept"),
    [("", 1), ("--save-interval-updates 20", 5), ("--save-interval-updates 20 --keep-interval-updates 2", 2)],
    ids=["ours", "saved as the user says", "kept as the user says"],
)
def test_the_cpu_keeps_enough_of_the_users_checkpoints_to_average(plan, given, kept):
    args = plan("multi30k-en-de", TINY, "--dry-run", "--gpus", 0, *given.split()).args
    assert args.keep_interval_updates == kept


def test_gpus_are_found_by_torch_and_old_ones_train_in_single_precision(plan, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for capability, halves in (((9, 0), True), ((7, 0), True), ((6, 1), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number, found=capability: found)
        assert find_gpus() == (2, halves)
        args = plan("wmt14-en-de", TINY, "--dry-run").args
        assert (step_of(args, 2), args.fp16, args.cpu) == (16384, halves, False)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("", ["CORPUS", "ARCH"]),
        ("iwslt transformer", ["'iwslt'", "iwslt15-en-vi", "wmt14-en-fr", "numbers"]),
        (f"{WMT} --gpus 2", ["--gpus", "--dry-run"]),
        (f"{WMT} --gpus 0 --fp16 --dry-run", ["--fp16", "GPU"]),
        ("wmt14-en-de transformer_rskip_lm --dry-run", ["transformer_rskip_lm", "did you mean transformer_rskip_ln?"]),
        *(
            (f"{WMT} --dry-run {option}", [option.split()[0].partition("=")[0], *accepted])
            for option, *accepted in [
                ("--skip-lamda 3", "did you mean --skip-lambda?"),
                ("--arch transformer", "twice"),
                ("--user-dir /no/such", "/no/such"),
                ("--max-tokens 0", "at least 1"),
                ("--lr 0", "above 0"),
                ("--lr=nan", "nan"),
                ("--adam-betas (2,2)", "two numbers"),
                ("--seed 99999999999999999999", "2^32"),
                ("--dropout 2", "below 1"),
                ("--encoder-layers 0", "at least 1"),
                ("--clip-norm -1", "at least 0"),
                ("--save-dir=", "a folder"),
            ]
        ),
    ],
)
def test_bad_input_is_one_line(plan, argv, parts):
    refused(plan(*argv.split()), *parts)


def test_data_that_are_not_prepared(plan, tmp_path, monkeypatch):
    monkeypatch.setattr("fairseq_rskip.tools.corpus.ROOT", tmp_path)
    refused(plan("iwslt15-en-vi", TINY), "not prepared", "rskip prepare iwslt15-en-vi")
    refused(plan("multi30k-en-de", TINY), "rskip prepare multi30k-en-de")
    refused(plan(tmp_path, TINY), "dict.SRC.txt")
    (tmp_path / "preparation.json").write_text("{")
    refused(plan(tmp_path, TINY), "preparation.json")


def test_preparation_json_picks_the_settings(plan, data):
    made = plan(data, TINY, "--dry-run", "--gpus", 1)
    assert (made.args.max_tokens, made.args.max_epoch) == (1000, 4)
    assert made.args.save_dir.endswith(f"checkpoints/numbers/{TINY}")
    (data / "data-bin" / "preparation.json").unlink()
    made = plan(data / "data-bin", TINY, "--dry-run", "--gpus", 1)
    assert (made.args.max_tokens, made.args.lr, made.args.max_epoch) == (2048, [0.001], 20)  # of Multi30k's size
    assert made.args.save_dir.endswith(f"checkpoints/ein Körper/{TINY}")
    note = "recipe: small (for 600 pairs; --recipe NAME selects another): 20 epochs, about 40 updates"
    assert note in made.err.splitlines()


def test_a_recipe_follows_the_number_of_pairs_or_is_named(plan, data):
    sizes = {99_999: "small", 100_000: "medium", 999_999: "medium", 1_000_000: "large", 36_000_000: "large"}
    assert {pairs: recipe_for(pairs) for pairs in sizes} == sizes
    made = plan(data, TINY, "--dry-run", "--gpus", 1, "--recipe", "large")
    assert (step_of(made.args, 1), made.args.max_update, made.args.no_epoch_checkpoints) == (16384, 100_000, True)
    assert "recipe: large: 100,000 updates, about 100,000.0 epochs" in made.err


@pytest.mark.parametrize(
    ("corpus", "given", "warmup", "warns"),
    [
        ("iwslt15-en-vi", "", 4000, False),
        ("iwslt15-en-vi", "--max-update 300", 12, False),
        ("iwslt15-en-vi", "--max-update 200000", 4000, False),
        ("iwslt15-en-vi", "--max-update 300 --warmup-updates 200", 200, True),
        ("multi30k-en-de", "--max-epoch 2", 80, False),
        ("multi30k-en-de", "--max-update 300", 800, True),
        ("DATA", "--max-update 4", 50, True),
    ],
    ids=["recipe's", "shortened", "lengthened", "user's", "epochs", "length unknown", "too long"],
)
def test_the_warm_up_of_a_shorter_training_is_shorter(plan, data, corpus, given, warmup, warns):
    """DATA: numbers' recipe, 4 epochs of 4 updates here with a warm-up of 200."""
    made = plan(data if corpus == "DATA" else corpus, TINY, "--dry-run", *given.split())
    assert made.args.warmup_updates == warmup
    assert ("--warmup-updates N" in made.err) == warns
    assert ("shortened" in made.err) == (made.args.warmup_updates not in (4000, 800, 200))


def test_embeddings_are_shared_only_with_one_dictionary(plan, data):
    with open(data / "data-bin" / "dict.tgt.txt", "a", encoding="utf-8") as dictionary:
        dictionary.write("more 1\n")
    assert "--share-all-embeddings" not in plan(data, TINY, "--dry-run").words


def test_a_folder_of_another_vocabulary_or_place_is_refused(plan, data, tmp_path):
    save = tmp_path / "save"
    save.mkdir()
    (save / "checkpoint_last.pt").touch()
    assert plan(data, TINY, "--dry-run", "--save-dir", save).status == 0
    (save / "dict.tgt.txt").write_text("a 1\n")
    refused(plan(data, TINY, "--save-dir", save), "dict.tgt.txt", "another vocabulary", "--save-dir")
    refused(plan(data, TINY, "--save-dir", save / "dict.tgt.txt" / "below"), "Not a directory")


@pytest.mark.parametrize(
    ("given", "room"),
    [
        ("", 4096),
        ("--max-tokens 600 --max-target-positions 3000", 3000),
        ("--max-source-positions 5000", 5000),
    ],
    ids=["cap", "target's", "source's"],
)
def test_validation_has_room_for_what_the_model_takes_and_leaves_out_the_rest(plan, given, room):
    args = plan("wmt14-en-de", TINY, "--dry-run", "--gpus", 8, *given.split()).args
    assert (int(args.max_tokens_valid), args.skip_invalid_size_inputs_valid_test) == (room, True)


def test_the_languages_of_preparation_json_are_passed_on(plan, data):
    words = plan(data, TINY, "--dry-run").words
    assert (words[words.index("--source-lang") + 1], words[words.index("--target-lang") + 1]) == ("src", "tgt")
    words = plan(data, TINY, "--dry-run", "--source-lang", "src").words
    assert words.count("--source-lang") == words.count("--target-lang") == 1
    other_way = plan(data, TINY, "--dry-run", "--source-lang", "tgt", "--target-lang", "src")
    assert (other_way.args.source_lang, other_way.args.target_lang) == ("tgt", "src")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("transformer_rskip_ln --skip-lambda 2.5", ["--skip-lambda 2.5", "expected an integer from 1"]),
        ("transformer_rskip_ln --skip-norm none", ["--skip-kind rskip", "--skip-norm none"]),
        ("transformer_wskip --skip-lambda 2", ["--skip-lambda 2", "kind wskip has no such option"]),
        ("transformer_xskip_ln --encoder-normalize-before", ["--encoder-normalize-before", "expected 'none'"]),
        ("transformer_rskip_ln --encoder-attention-heads 3", ["--encoder-attention-heads 3", "-embed-dim 512"]),
        ("transformer --decoder-attention-heads 7", ["transformer", "divisible by num_heads"]),
    ],
)
def test_a_model_that_cannot_be_built_is_one_line_and_leaves_nothing(plan, data, tmp_path, argv, parts):
    refused(plan(data, *argv.split(), "--save-dir", tmp_path / "save"), *parts)
    assert not (tmp_path / "save").exists()


def test_the_usage_names_the_command_as_it_was_called():
    by_script = run_command([SCRIPT, "numbers", "-h"]).stdout
    by_name = run_command(["python", "-m", "fairseq_rskip.tools", "train", "-h"]).stdout
    assert by_script.startswith("usage: train.sh CORPUS ARCH") and "--recipe" in by_script
    assert by_name.startswith("usage: rskip train CORPUS ARCH") and len(by_name.splitlines()) < 50


def test_the_list_of_architectures_has_each_variant_and_size_once(capsys):
    assert main(["--archs"]) == 0
    text = capsys.readouterr().out
    assert text.index("rskip_ln") < text.index("vaswani_wmt_en_de_big") < text.index("bart_base")
    assert text.count("transformer_rskip_ln") == 0 and len(text) < 8000


def test_a_text_trains_a_language_model(plan, tmp_path):
    """fairseq's settings for WikiText-103; an adaptive softmax needs its own loss."""
    args = plan("wikitext103", "transformer_lm_rskip_ln", "--dry-run", "--gpus", 8).args
    told = (args.task, args.criterion, args.tokens_per_sample, args.sample_break_mode)
    assert told == ("language_modeling", "cross_entropy", 512, "none")
    assert (step_of(args, 8), args.max_update, args.lr, args.weight_decay) == (32768, 50_000, [5e-4], 0.01)
    assert args.share_decoder_input_output_embed is True
    assert plan("wikitext103", "transformer_lm", "--dry-run", "--gpus", 8).args.max_tokens == 4096
    for arch in ("transformer_lm_rskip_ln_wiki103", "transformer_lm_wiki103"):
        args = plan("wikitext103", arch, "--dry-run", "--gpus", 1).args
        assert (args.criterion, args.ddp_backend) == ("adaptive_loss", "legacy_ddp")
        assert not getattr(args, "share_decoder_input_output_embed", False)
    refused(plan("wikitext103", TINY, "--dry-run"), "wikitext103 is a text: expected a language model, transf")
    refused(plan("wmt14-en-de", "transformer_lm_gpt", "--dry-run"), "wmt14-en-de has two languages: expected a trans")
