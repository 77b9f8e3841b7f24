"""Training on from a checkpoint of stock fairseq, whose optimizer orders parameters otherwise."""

import shlex

import pytest
import text_corpus
from conftest import run_checked, run_command
from optimizer_helpers import ON_A_CPU, PRECISIONS

pytestmark = pytest.mark.slow

MODEL = shlex.split(
    "--decoder-layers 1 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 "
    "--decoder-ffn-embed-dim 32 --decoder-attention-heads 2 --disable-validation"
)
RESETS = shlex.split("--reset-optimizer --reset-lr-scheduler --reset-meters --reset-dataloader")


@pytest.mark.parametrize("precision", ["fp32", "flat"])
def test_the_state_of_stocks_optimizer_is_refused_and_its_model_is_not(tmp_path, precision):
    """In one flat tensor, as under --fp16, the state would fit without an error."""
    data = text_corpus.prepare(tmp_path / "text")

    def command(arch, save_dir, updates, *more):
        options = [*text_corpus.TRAINING, *MODEL, *PRECISIONS[precision], *more]
        options += ["--fp16-init-scale", 4, "--max-update", updates, "--save-dir", save_dir]
        return ["python-with-fairseq", ON_A_CPU, data, "--arch", arch, *options]

    run_checked(command("transformer_lm", tmp_path / "stock", 2))
    restore = ["--restore-file", tmp_path / "stock" / "checkpoint_last.pt"]

    def plugin(updates, *more):
        more = [*text_corpus.PLUGIN, *more]
        return command("transformer_lm_postln", tmp_path / "plugin", updates, *more)

    refused = run_command(plugin(4, *restore))
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr
    last = refused.stderr.strip().splitlines()[-1]
    assert "order of stock fairseq's parameters: expected --reset-optimizer" in last

    run_checked(plugin(4, *restore, *RESETS))
    run_checked(plugin(6))  # the plugin's own state is taken over
