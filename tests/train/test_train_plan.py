"""``rskip train`` up to the training.

The tests cover the command that it makes, read by fairseq's own parser, and what it refuses.
"""

import shutil
from pathlib import Path

import pytest
import torch
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from training_corpus import planner, prepare, refused

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.__main__ import main
from fairseq_rskip.tools.corpus import Corpus
from fairseq_rskip.tools.recipes import recipe_for
from fairseq_rskip.tools.train.main import read
from fairseq_rskip.tools.train.plan import make_plan

TINY = "transformer_rskip_ln_tiny"
WMT, IWSLT, CAPTIONS = f"wmt14-en-de {TINY}", f"iwslt15-en-vi {TINY}", f"multi30k-en-de {TINY}"

# corpus, architecture, tokens a step, updates, peak learning rate, dropout: the paper, section 4.1,
# and Vaswani et al.
PAPER = [
    (
        "iwslt15-en-vi",
        "transformer_rskip_ln_iwslt_en_vi",
        4096,
        100000,
        7e-4,
        0.1,
    ),  # 100,000 is our choice
    ("iwslt15-en-vi", "transformer_rskip_ln_vaswani_wmt_en_de_big", 4096, 100000, 5e-4, 0.3),
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
    assert (args.arch, step_of(args, 1), args.lr) == (arch, tokens, [rate])
    assert (args.optimizer, args.adam_betas, args.adam_eps) == ("adam", "(0.9, 0.98)", 1e-9)
    assert (args.lr_scheduler, args.warmup_updates, args.warmup_init_lr) == (
        "inverse_sqrt",
        4000,
        1e-7,
    )
    assert (args.criterion, args.label_smoothing) == ("label_smoothed_cross_entropy", 0.1)
    assert args.max_update == updates
    model = convert_namespace_to_omegaconf(args).model
    assert (model.dropout, model.share_all_embeddings, model.encoder_normalize_before) == (
        dropout,
        True,
        False,
    )


def test_multi30k_tiny_has_the_settings_of_wu_et_al(plan):
    """README-baseline.md and transformer_tiny have these settings.

    They are in github.com/LividWo/Revisit-MMT, the paper's code.
    """
    args = plan(*CAPTIONS.split(), "--recipe", "multi30k-tiny", "--dry-run", "--gpus", 0).args
    for side in ("encoder", "decoder"):
        shape = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")
        assert [getattr(args, f"{side}_{name}") for name in shape] == [4, 128, 256, 4]
    assert (args.dropout, args.label_smoothing, args.share_all_embeddings) == (0.3, 0.1, True)
    assert (args.lr, args.warmup_updates, args.warmup_init_lr) == ([0.005], 2000, 1e-7)
    assert (step_of(args, 1), args.max_update, args.patience) == (4096, 8000, 10)
    assert (args.keep_last_epochs, args.save_interval_updates) == (10, 0)


STOPPED = (
    "INFO | fairseq_cli.train | early stop since valid performance hasn't improved for last 10 runs"
)


def test_a_training_can_begin_with_another_checkpoint_than_its_last(data, tmp_path):
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        (tmp_path / name).write_bytes(b"torn")
    words = [str(data), TINY, "--max-update", "9", "--save-dir", str(tmp_path), "--dry-run"]
    plan = make_plan(*read([*words, "--restore-file", str(tmp_path / "checkpoint_best.pt")]))
    assert plan.why_finished() == ""  # the last checkpoint is not read
    with pytest.raises(UserError, match=f"did you mean {tmp_path}/checkpoint_best.pt"):
        make_plan(*read([*words, "--restore-file", "checkpoint_best.pt"]))


@pytest.mark.parametrize("option", ["--restore-file", "--finetune-from-model"])
def test_a_folder_is_no_checkpoint_to_begin_with(data, tmp_path, capsys, option):
    """fairseq would train from random values without a word on the screen."""
    parent = tmp_path / "parent"
    parent.mkdir()
    words = ["train", str(data), TINY, "--save-dir", str(tmp_path / "new"), "--dry-run"]
    assert main([*words, option, str(parent)]) == 1
    assert f"{option} {parent} is a folder; expected a checkpoint" in capsys.readouterr().err
    (parent / "checkpoint_best.pt").touch()
    assert main([*words, option, str(parent)]) == 1
    expected = f"{option} {parent} is a folder; did you mean {parent}/checkpoint_best.pt?"
    assert expected in capsys.readouterr().err
    assert main([*words, option, str(parent / "checkpoint_best.pt")]) == 0


def test_a_training_that_resumes_does_not_need_the_model_that_it_began_with(data, tmp_path):
    words = [str(data), TINY, "--save-dir", str(tmp_path), "--finetune-from-model", "gone.pt"]
    plan = make_plan(*read(words))
    with pytest.raises(UserError, match="--finetune-from-model gone.pt does not exist"):
        plan.check_parent()
    (tmp_path / "checkpoint_last.pt").touch()
    plan.check_parent()


@pytest.mark.parametrize(
    ("log", "patience", "ended"),
    [
        (["x", STOPPED, "done training in 3.0 seconds"], [], True),
        ([STOPPED], ["--patience", "10"], True),
        ([STOPPED], ["--patience", "20"], False),
        ([STOPPED, *["resumed"] * 30], [], False),
        ([], [], False),
    ],
    ids=["by the recipe", "same", "larger", "resumed since", "no reason"],
)
def test_what_patience_has_ended_is_not_trained_further(data, tmp_path, log, patience, ended):
    (tmp_path / "train.log").write_text("\n".join(log))
    words = [str(data), TINY, "--recipe", "multi30k-tiny", "--save-dir", str(tmp_path), *patience]
    reason = make_plan(*read([*words, "--dry-run"])).why_finished()
    assert ("no better validation for 10 epochs" in reason) == ended


def test_multi30k_tiny_shapes_no_language_model(plan):
    args = plan(
        "captions", "transformer_lm_rskip_ln_tiny", "--recipe", "multi30k-tiny", "--dry-run"
    ).args
    assert (args.decoder_layers, args.decoder_embed_dim) == (4, 128)
    assert not hasattr(args, "encoder_layers")


@pytest.mark.parametrize("gpus", [0, 1, 3, 8])
@pytest.mark.parametrize(("corpus", "tokens"), [("wmt14-en-de", 16384), ("multi30k-en-de", 2048)])
def test_a_step_has_the_papers_tokens_on_any_number_of_gpus(plan, corpus, tokens, gpus):
    made = plan(corpus, TINY, "--dry-run", "--gpus", gpus)
    args, processes = made.args, max(1, gpus)
    assert tokens - processes * args.update_freq[0] < step_of(args, processes) <= tokens
    assert args.max_tokens <= 4096 <= int(args.max_tokens_valid)
    assert f"= {step_of(args, processes)}; the recipe's: {tokens}" in made.err
    assert (args.fp16, args.cpu, "slow" in made.err) == (gpus > 0, gpus == 0, gpus == 0)


DIM = "--encoder-embed-dim 256 --decoder-embed-dim 256"
OPTIONS = [  # what the user gives holds, and the rest follows: words, what fairseq reads
    (f"{IWSLT} {DIM}", {"lr": [1e-3]}),
    (f"{WMT} --gpus 2 --max-tokens 1024", {"max_tokens": 1024, "update_freq": [8]}),
    (f"{WMT} --gpus 1 --max-tokens 16384", {"max_tokens": 16384, "update_freq": [1]}),
    (
        f"{WMT} --gpus 2 --batch-size 64 --update-freq 3",
        {"max_tokens": None, "batch_size": 64, "update_freq": [3]},
    ),
    (f"{WMT} --gpus 1 --no-fp16", {"fp16": False}),
    (f"{WMT} --gpus 8 --bf16", {"bf16": True, "fp16": False}),
    (
        f"{WMT} --gpus 8 --cpu",
        {"cpu": True, "fp16": False, "distributed_world_size": 1, "update_freq": [4]},
    ),
    (f"{CAPTIONS} --gpus 0 --save-interval-updates 20", {"keep_interval_updates": 5}),
    (
        f"{CAPTIONS} --gpus 0 --save-interval-updates 20 --keep-interval-updates 2",
        {"keep_interval_updates": 2},
    ),
    # a step takes seconds on a CPU, whatever a recipe for GPUs has
    (f"{WMT} --gpus 0", {"save_interval_updates": 200, "keep_interval_updates": 1}),
    (f"{WMT} --gpus 1", {"save_interval_updates": 2500, "keep_interval_updates": 10}),
    (f"{WMT} --gpus 0 --save-interval-updates 100", {"keep_interval_updates": 5}),
    (f"{CAPTIONS} --gpus 0 --recipe multi30k-tiny", {"save_interval_updates": 0}),
    (f"{WMT} --gpus 8 --max-tokens 600", {"max_tokens_valid": "1024"}),
    (
        f"{IWSLT} --optimizer sgd --save-dir /x/y",
        {"optimizer": "sgd", "tensorboard_logdir": "/x/y/tensorboard", "skip_log_interval": 100},
    ),
    (f"{IWSLT} --skip-log-interval 0", {"skip_log_interval": 0}),
    (f"{CAPTIONS} --max-update 300", {"max_update": 300, "max_epoch": 0}),
    (f"{IWSLT} --max-epoch 3", {"max_update": 0, "max_epoch": 3}),
    (
        f"{CAPTIONS} --recipe multi30k-tiny --max-update 0",
        {"max_update": 0, "max_epoch": 0, "patience": 10},
    ),
    (  # its dimension decides where the recipe has no rate
        "captions transformer_lm_rskip_ln_tiny --recipe iwslt15-en-vi --decoder-embed-dim 256",
        {"lr": [1e-3]},
    ),
]


@pytest.mark.parametrize(("argv", "expected"), OPTIONS)
def test_the_users_options_win_and_the_rest_follows(plan, argv, expected):
    args = plan(*argv.split(), "--dry-run").args
    assert {name: getattr(args, name) for name in expected} == expected


def test_gpus_are_found_by_torch(plan, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    args = plan("wmt14-en-de", TINY, "--dry-run").args
    assert (step_of(args, 2), args.fp16, args.cpu) == (16384, True, False)


REFUSED = [
    ("--skip-lamda 3", "did you mean --skip-lambda?"),
    ("--learning-rate 0.1", "did you mean --lr?"),
    ("--max-steps=3", "did you mean --max-update?"),
    ("--epochs 3", "did you mean --max-epoch?"),
    ("--adam-eps=1e-9 --optimizer sgd", "takes no option"),  # the recipe has it, too
    ("--max-tokens 0", "at least 1"),
    ("--lr 0", "above 0"),
    ("--lr=nan", "nan"),
    ("--adam-eps 0", "above 0"),
    ("--lr 0.1,0.2", "--lr 0.1,0.2: expected one rate for --lr-scheduler inverse_sqrt"),
    ("--clip-norm=-1", "at least 0"),
    ("--update-freq 0", "at least 1"),
    ("--batch-size 0", "at least 1"),
    ("--decoder-layers 0", "at least 1"),
    ("--adam-betas (2,2)", "two numbers"),
    ("--weight-decay=-1", "at least 0"),
    ("--save-dir=", "a folder"),
    ("--seed 99999999999999999999", "2^32"),
    ("--dropout 2", "below 1"),
    ("--restore-file none.pt", "none.pt does not exist"),
    ("--restore-file a.pt --finetune-from-model b.pt", "expected one of them"),
]


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            "iwslt transformer",
            ["'iwslt'", "iwslt15-en-vi", "numbers", "your own text: rskip prepare --src"],
        ),
        (f"{WMT} --gpus 0 --fp16 --dry-run", ["--fp16", "GPU"]),
        (f"{WMT} --dry-run --max-update 0", ["has no end", "--max-update"]),
        (
            "wmt14-en-de transformer_rskip_lm --dry-run",
            ["transformer_rskip_lm", "did you mean transformer_rskip_ln?"],
        ),
        (
            "wmt14-en-de transformer_mine_tiny --dry-run",
            ["transformer_mine_tiny", "a rule of your own needs RSKIP_RULES=FILE"],
        ),
        (
            "wmt14-en-de transformer_xskip_lnn --dry-run",
            ["transformer_xskip_lnn", "did you mean transformer_xskip_ln?"],
        ),
        (
            "wmt14-en-de transformer_rskip_ln_big --dry-run",
            ["transformer_rskip_ln_big", "the sizes of transformer_rskip_ln are none and _tiny"],
        ),
        *(
            (f"{WMT} --dry-run {word}", [word.partition(" ")[0].partition("=")[0], part])
            for word, part in REFUSED
        ),
    ],
)
def test_bad_input_is_one_line(plan, argv, parts):
    refused(plan(*argv.split()), *parts)


def test_data_that_are_not_prepared(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(plan("iwslt15-en-vi", TINY), "not prepared", "rskip prepare iwslt15-en-vi")
    refused(plan(tmp_path, TINY), "dict.SRC.txt", "rskip prepare makes a data-bin")
    refused(plan("data/nowhere", TINY), "data/nowhere does not exist", "rskip prepare")
    (tmp_path / "preparation.json").write_text("{")
    refused(plan(tmp_path, TINY), "preparation.json")


def test_a_word_is_the_prepared_one_of_two_folders(plan, data, tmp_path, monkeypatch):
    """A folder with the plain text may have the name of the corpus in ./data."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(data, tmp_path / "data" / "mine")
    (tmp_path / "mine").mkdir()
    assert Corpus.find("mine").folder == Path("data/mine/data-bin")
    assert Corpus.find("./mine").folder == Path("./mine")
    (tmp_path / "mine").rmdir()
    (tmp_path / "mine").symlink_to(tmp_path / "data" / "mine")
    assert Corpus.find("mine").folder == Path("data/mine/data-bin")
    (tmp_path / "mine").unlink()
    shutil.copytree(data, tmp_path / "mine")
    refused(plan("mine", TINY), "both ./mine and data/mine are prepared corpora: write which")
    assert Corpus.find("./mine").folder == Path("mine/data-bin")
    monkeypatch.chdir(tmp_path / "data")
    assert Corpus.find_or_plan("..").name == tmp_path.name  # not ..: it names a folder
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    made = plan("other", TINY, "--dry-run", "--max-update", 9)
    assert "other/data-bin is not prepared: the recipe is that of" in made.err


def test_the_corpus_its_size_or_the_user_picks_the_recipe(plan, data):
    made = plan(data, TINY, "--dry-run", "--gpus", 1)
    assert (made.args.max_tokens, made.args.max_epoch) == (1000, 4)
    assert made.args.save_dir.endswith(f"checkpoints/numbers/{TINY}")
    assert (made.args.source_lang, made.args.target_lang) == ("src", "tgt")  # of preparation.json
    made = plan(data, TINY, "--dry-run", "--gpus", 1, "--recipe", "large")
    assert (step_of(made.args, 1), made.args.max_update, made.args.no_epoch_checkpoints) == (
        16384,
        100_000,
        True,
    )
    (data / "data-bin" / "preparation.json").unlink()
    made = plan(data / "data-bin", TINY, "--dry-run", "--gpus", 1)
    assert (made.args.max_tokens, made.args.lr, made.args.max_epoch) == (
        2048,
        [0.001],
        20,
    )  # of Multi30k's size
    assert made.args.save_dir.endswith(f"checkpoints/ein Körper/{TINY}")
    note = "recipe: small (for 600 pairs; --recipe NAME selects another): 20 epochs"
    assert note in made.err.splitlines()
    sizes = {
        99_999: "small",
        100_000: "medium",
        999_999: "medium",
        1_000_000: "large",
        36_000_000: "large",
    }
    assert {pairs: recipe_for(pairs) for pairs in sizes} == sizes


@pytest.mark.parametrize(
    ("argv", "warmup", "warns"),
    [
        (f"{IWSLT} --max-update 300", 12, False),
        (f"{IWSLT} --max-update 300 --warmup-updates 200", 200, True),
        (f"{CAPTIONS} --max-epoch 2", 80, False),
        (f"{CAPTIONS} --max-update 300", 60, False),
        (f"{IWSLT} --max-epoch 1", 4000, False),
    ],
)
def test_the_warm_up_of_a_shorter_training_is_shorter(plan, argv, warmup, warns):
    made = plan(*argv.split(), "--dry-run")
    assert made.args.warmup_updates == warmup
    assert ("--warmup-updates N" in made.err) == warns
    assert ("the recipe has" in made.err) == (warmup != 200)


def test_no_warm_up_is_refused_where_fairseq_would_divide_by_it(plan):
    words = f"{IWSLT} --warmup-updates 0".split()
    refused(plan(*words, "--dry-run"), "error: --warmup-updates 0: expected 1 or more")
    other = plan(*f"{IWSLT} --warmup-updates 0 --lr-scheduler fixed".split(), "--dry-run")
    assert other.args.warmup_updates == 0


@pytest.mark.parametrize(
    ("options", "share", "ramp"),
    [("", "0.083", "6,000"), ("--skip-warmup 100", "0.83", "600"), ("--skip-warmup 20", "", "")],
)
def test_a_training_that_ends_within_the_ramp_of_prores_is_warned_of(plan, options, share, ramp):
    """The last of six layers has its full weight from update 6 T on, of T = 1,000 by default."""
    made = plan(
        "captions", "transformer_lm_prores", "--dry-run", "--max-update", 500, *options.split()
    )
    assert ("full weight" in made.err) == bool(ramp)
    said = f"have {share} of their full weight, which they have from update {ramp} on"
    assert not ramp or said in made.err


def test_embeddings_are_shared_only_with_one_dictionary(plan, data):
    assert "--share-all-embeddings" in plan(data, TINY, "--dry-run").words
    some = plan(data, TINY, "--share-decoder-input-output-embed", "--dry-run").words
    assert "--share-all-embeddings" not in some  # the user shares fewer
    with open(data / "data-bin" / "dict.tgt.txt", "a", encoding="utf-8") as dictionary:
        dictionary.write("more 1\n")
    assert "--share-all-embeddings" not in plan(data, TINY, "--dry-run").words
    refused(plan(data, TINY, "--share-all-embeddings"), "--joined-dictionary")


def test_the_direction_is_the_corpuss(plan, data):
    refused(
        plan(data, TINY, "--source-lang", "tgt", "--target-lang", "src"),
        "src-tgt",
        "expected that direction",
    )


def test_a_folder_of_another_vocabulary_or_place_is_refused(plan, data, tmp_path):
    save = tmp_path / "save"
    save.mkdir()
    (save / "checkpoint_last.pt").touch()
    assert plan(data, TINY, "--dry-run", "--save-dir", save).status == 0
    (save / "dict.tgt.txt").write_text("a 1\n")
    refused(
        plan(data, TINY, "--save-dir", save), "dict.tgt.txt", "another vocabulary", "--save-dir"
    )
    refused(plan(data, TINY, "--save-dir", save / "dict.tgt.txt" / "x"), "Not a directory")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            "transformer_rskip_ln --skip-lambda 2.5",
            ["--skip-lambda 2.5", "expected an integer from 1"],
        ),
        ("transformer_wskip --skip-lambda 2", ["--skip-lambda 2", "kind wskip has no such option"]),
        ("transformer --decoder-attention-heads 7", ["transformer", "divisible by num_heads"]),
    ],
)
def test_a_model_that_cannot_be_built_is_one_line_and_leaves_nothing(
    plan, data, tmp_path, argv, parts
):
    refused(plan(data, *argv.split(), "--save-dir", tmp_path / "save"), *parts)
    assert not (tmp_path / "save").exists()


def test_a_text_trains_a_language_model(plan):
    """fairseq's settings for WikiText-103; an adaptive softmax needs its own loss."""
    args = plan("wikitext103", "transformer_lm_rskip_ln", "--dry-run", "--gpus", 8).args
    settings = (args.task, args.criterion, args.tokens_per_sample, args.sample_break_mode)
    assert settings == ("language_modeling", "cross_entropy", 512, "none")
    assert (step_of(args, 8), args.max_update, args.lr, args.weight_decay) == (
        32768,
        50_000,
        [5e-4],
        0.01,
    )
    assert args.share_decoder_input_output_embed is True
    for arch in ("transformer_lm_rskip_ln_wiki103", "transformer_lm_wiki103"):
        args = plan("wikitext103", arch, "--dry-run", "--gpus", 1).args
        assert (args.criterion, args.ddp_backend) == ("adaptive_loss", "legacy_ddp")
        assert not getattr(args, "share_decoder_input_output_embed", False)
    refused(
        plan("wikitext103", TINY, "--dry-run"), "wikitext103 is a text: expected a language model"
    )
    lm = "transformer_lm_rskip_ln_tiny"
    refused(
        plan("wikitext103", lm, "--arch", "transformer_lm_postln", "--dry-run"),
        f"--arch transformer_lm_postln: the architecture is {lm} already",
    )
    refused(
        plan("wikitext103", lm, "--skip-kind", "highway", "--dry-run"),
        f"--skip-kind highway: {lm} is kind rskip",
        "or transformer_lm_skip with this option",
    )
    for arch, kind in ((lm, "rskip"), ("transformer_lm_skip_tiny", "highway")):
        plan("wikitext103", arch, "--skip-kind", kind, "--dry-run", "--gpus", 1)
    refused(
        plan("wmt14-en-de", "transformer_lm_gpt", "--dry-run"),
        "wmt14-en-de has two languages: expected a trans",
    )
