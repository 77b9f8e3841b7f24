"""Two real processes over gloo against one process that accumulates two batches: same loss, same weights."""

import json
import sys

import pytest
import torch
from conftest import ROOT, run_checked

from fairseq_rskip import compat

pytestmark = pytest.mark.slow

COMMON = (
    "--source-lang src --target-lang tgt --encoder-embed-dim 32 --encoder-ffn-embed-dim 32 --dropout 0 "
    "--optimizer adam --lr 0.003 --clip-norm 1.0 --criterion label_smoothed_cross_entropy --label-smoothing 0.1 "
    "--max-tokens 400 --max-update 6 --seed 3 --cpu --log-format json --log-interval 1 "
    "--disable-validation --no-progress-bar --num-workers 0"
).split()


def train(corpus, save_dir, arch, processes, ddp_backend):
    command = [f"{sys.prefix}/bin/fairseq-train", corpus, "--user-dir", ROOT / "fairseq_rskip", *COMMON]
    command += ["--arch", arch, "--save-dir", save_dir, "--ddp-backend", ddp_backend]
    if processes == 1:
        command += ["--update-freq", "2"]
    else:
        free_port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        command = ["torchrun", "--nproc_per_node", processes, *free_port, *command, "--distributed-backend", "gloo"]
    log = run_checked(command)
    assert "unused parameter" not in log.lower()
    losses = [json.loads(line[line.index("{") :])["loss"] for line in log.splitlines() if '"num_updates"' in line]
    state = compat.load_checkpoint(save_dir / "checkpoint_last.pt")["model"]
    return [float(x) for x in losses], state


@pytest.mark.parametrize(
    ("arch", "ddp_backend"),
    [
        ("transformer_rskip_ln_tiny", "legacy_ddp"),
        ("transformer_rskip_ln_tiny", "pytorch_ddp"),
        ("transformer_xskip_bn_tiny", "pytorch_ddp"),
        ("transformer_wskip_ln_tiny", "legacy_ddp"),
        ("transformer_wskip_ln_tiny", "pytorch_ddp"),
    ],
)
def test_two_processes_equal_one_with_update_freq_2(tiny_corpus, tmp_path, arch, ddp_backend):
    """Batch normalisation takes each process's own batch, as each of the accumulated batches is its own: the weights
    agree too. Its running statistics are each process's own (the checkpoint holds the first one's)."""
    one_losses, one = train(tiny_corpus, tmp_path / "one", arch, 1, ddp_backend)
    two_losses, two = train(tiny_corpus, tmp_path / "two", arch, 2, ddp_backend)
    assert len(one_losses) >= 6
    assert two_losses == pytest.approx(one_losses, abs=2e-3)
    assert one_losses[5] < one_losses[0]
    assert one.keys() == two.keys()
    for name in one:
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked", "_float_tensor")):
            torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
