"""fairseq's own commands with ``--user-dir fairseq_rskip``.

Each runs in a process of its own, on a generated corpus.
"""

import pytest
import torch
from conftest import ROOT, run_checked, run_command

from fairseq_rskip import compat

pytestmark = pytest.mark.slow

PLUGIN = ["--user-dir", str(ROOT / "fairseq_rskip")]
DIMS = "--encoder-embed-dim 32 --encoder-ffn-embed-dim 32".split()
TRAINING = (
    "--source-lang src --target-lang tgt --optimizer adam --lr 0.005 --lr-scheduler inverse_sqrt "
    "--warmup-updates 10 --criterion label_smoothed_cross_entropy --label-smoothing 0.1 "
    "--max-tokens 600 --seed 3 --cpu --num-workers 0 "
    "--log-format json --no-progress-bar --no-epoch-checkpoints"
).split()


def train_command(corpus, save_dir, *options, arch="transformer_rskip_ln_tiny"):
    command = ["fairseq-train", corpus, *PLUGIN, "--arch", arch, *DIMS, *TRAINING]
    return [*command, "--save-dir", save_dir, *options]


def train(corpus, save_dir, *options, arch="transformer_rskip_ln_tiny"):
    return run_checked(train_command(corpus, save_dir, *options, arch=arch))


def weights(save_dir):
    """Return parameters and buffers.

    A buffer that fairseq never initialises nor reads for its value is left out.
    """
    state = compat.load_checkpoint(save_dir / "checkpoint_last.pt")["model"]
    return {name: value for name, value in state.items() if not name.endswith("_float_tensor")}


@pytest.fixture(scope="module")
def trained(tiny_corpus, tmp_path_factory):
    """A model trained for four epochs without interruption, checkpoints every 8 updates."""
    save_dir = tmp_path_factory.mktemp("trained")
    return save_dir, train(tiny_corpus, save_dir, "--max-epoch", 4, "--save-interval-updates", 8)


def test_a_resumed_run_ends_with_the_same_weights(tiny_corpus, trained, tmp_path):
    """From the middle of an epoch."""
    (half,) = trained[0].glob("checkpoint_*_16.pt")
    assert "Loaded checkpoint" in train(
        tiny_corpus, tmp_path, "--max-epoch", 4, "--restore-file", half
    )
    whole = weights(trained[0])
    for name, value in weights(tmp_path).items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=0)


def test_hydra_train_builds_the_architecture_with_its_defaults(tiny_corpus, tmp_path):
    overrides = (
        f"task=translation task.data={tiny_corpus} task.source_lang=src task.target_lang=tgt "
        f"common.user_dir={ROOT}/fairseq_rskip common.cpu=true "
        "model._name=transformer_rskip_ln_tiny model.encoder_ffn_embed_dim=48 "
        "criterion=label_smoothed_cross_entropy optimizer=adam optimization.lr=[0.001] "
        f"optimization.max_update=2 dataset.max_tokens=400 checkpoint.save_dir={tmp_path}"
    ).split()
    run_checked(["fairseq-hydra-train", *overrides], cwd=tmp_path)
    state = weights(tmp_path)
    layers = {name.split(".")[2] for name in state if name.startswith("encoder.layers.")}
    assert layers == {"0", "1"}
    assert state["encoder.layers.0.fc1.weight"].shape == (48, 64)
    assert state["decoder.layers.0.fc1.weight"].shape == (48, 64)
    assert "encoder.layers.0.final_skip.post.1.weight" in state
    assert "encoder.layers.0.final_skip.post.2.weight" not in state


def test_a_misspelt_architecture_is_one_line_with_the_nearest_name(tmp_path):
    done = run_command(["fairseq-train", tmp_path, *PLUGIN, "--arch", "transformer_rskp_ln"])
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error: " in line]
    assert line.startswith("fairseq-train: error: no architecture named 'transformer_rskp_ln'; ")
    assert "did you mean transformer_rskip_ln? " in line
    assert "transformer_vaswani" not in done.stderr


@pytest.mark.parametrize("kind,meant", [("rskp", "rskip"), ("MUDDFormer", "mudd")])
def test_a_misspelt_kind_is_one_line_with_the_nearest(tmp_path, kind, meant):
    command = ["fairseq-train", tmp_path, *PLUGIN, "--arch", "transformer_skip"]
    done = run_command([*command, "--skip-kind", kind])
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"fairseq-train: error: --skip-kind {kind}: did you mean {meant}?"


def test_help_has_the_options_of_the_architecture(tmp_path):
    help_text = run_checked(["fairseq-train", *PLUGIN, "--arch", "transformer_rskip_ln", "-h"])
    assert "Options of --arch transformer_rskip_ln" in help_text
    assert "--skip-lambda" in help_text


def test_a_checkpoint_of_another_lambda_is_one_line(tiny_corpus, trained, tmp_path):
    """fairseq catches the error and raises its own.

    The line that names both λ must come through.
    """
    restore = ["--restore-file", trained[0] / "checkpoint_last.pt"]
    done = run_command(train_command(tiny_corpus, tmp_path, "--skip-lambda", 3, *restore))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "was saved with skip_lambda=2: expected 3" in done.stderr.strip().splitlines()[-1]


def test_generate_without_the_plugin_says_so_in_one_line(tiny_corpus, trained):
    """README's troubleshooting quotes this message."""
    command = [
        "fairseq-generate",
        tiny_corpus,
        "--path",
        trained[0] / "checkpoint_last.pt",
        "--cpu",
    ]
    done = run_command([*command, "--source-lang", "src", "--target-lang", "tgt"])
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: no architecture named 'transformer_rskip_ln_tiny' is registered")
    assert "--user-dir" in last


def test_building_a_model_on_a_cpu_keeps_freed_memory():
    """Memory that was freed is used again without a page fault, once a model of ours was built."""
    code = """
import argparse, resource, torch
from fairseq.data import Dictionary
import fairseq_rskip.models
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def fewest_faults_of_a_use():
    # The least of several: a block freed below another one is a few bytes short for an aligned
    # request of the same size, so the second use may still take new pages.
    uses = []
    for _ in range(6):
        before = page_faults()
        torch.ones(2**24)  # 64 MB, 16,384 pages of 4 KiB
        uses.append(page_faults() - before)
    return min(uses)

stock = fewest_faults_of_a_use()
words = Dictionary()
task = argparse.Namespace(source_dictionary=words, target_dictionary=words)
model = ARCH_MODEL_REGISTRY["transformer_rskip_ln_tiny"]
config = getattr(model, "__dataclass")()
config.max_source_positions = config.max_target_positions = 64
model.build_model(config, task)
print(stock, fewest_faults_of_a_use())
"""
    before, after = map(int, run_checked(["python", "-c", code]).split()[-2:])
    assert before > 1000 and after < before / 10  # huge pages make fewer faults of more bytes
