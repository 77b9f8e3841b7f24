"""Two real processes over gloo against one process that accumulates two batches.

They have the same loss and the same weights.
"""

import json
import sys

import pytest
import torch
from conftest import ROOT, run_checked, skip_lines

from fairseq_rskip import compat

pytestmark = pytest.mark.slow

COMMON = (
    "--source-lang src --target-lang tgt --encoder-embed-dim 32 --encoder-ffn-embed-dim 32 "
    "--dropout 0 --optimizer adam --lr 0.003 --clip-norm 1.0 "
    "--criterion label_smoothed_cross_entropy --label-smoothing 0.1 "
    "--max-tokens 400 --max-update 6 --seed 3 --cpu --log-format json --log-interval 1 "
    "--disable-validation --no-progress-bar --num-workers 0"
).split()


# Two processes that find each other through a file, forked from one that has imported fairseq.
TWO = """
import os, sys
from fairseq_cli.train import cli_main
arguments, children = {arguments}, []
for rank in ("0", "1"):
    children.append(os.fork())
    if not children[-1]:
        sys.argv = [*arguments, "--distributed-rank", rank]
        cli_main()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def train(corpus, save_dir, arch, ddp_backend, launcher):
    command = [
        "fairseq-train",
        corpus,
        "--user-dir",
        ROOT / "fairseq_rskip",
        *COMMON,
        "--arch",
        *arch.split(),
    ]
    command += ["--save-dir", save_dir, "--ddp-backend", ddp_backend]
    if launcher == "none":
        command += ["--update-freq", "2"]
    elif launcher == "torchrun":
        command += ["--skip-log-interval", 1, "--tensorboard-logdir", save_dir / "events"]
        free_port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        command = [
            "torchrun",
            "--nproc_per_node",
            2,
            *free_port,
            f"{sys.prefix}/bin/{command[0]}",
            *command[1:],
        ]
        command += ["--distributed-backend", "gloo"]
    else:
        actual = f"--distributed-backend gloo --distributed-init-method file://{save_dir}.init"
        command += [*actual.split(), "--distributed-world-size", 2, "--distributed-no-spawn"]
        command = ["python-with-fairseq", TWO.format(arguments=[str(word) for word in command])]
    log = run_checked(command)
    assert "unused parameter" not in log.lower() and "--skip-log-interval 1 needs" not in log
    losses = [
        json.loads(line[line.index("{") :])["loss"]
        for line in log.splitlines()
        if '"num_updates"' in line
    ]
    state = compat.load_checkpoint(save_dir / "checkpoint_last.pt")["model"]
    return [float(x) for x in losses], state


@pytest.mark.parametrize(
    ("arch", "ddp_backend", "launcher"),
    [
        ("transformer_rskip_ln_tiny", "legacy_ddp", "torchrun"),  # as docs/distributed.md has it
        ("transformer_xskip_bn_tiny", "pytorch_ddp", "torchrun"),  # once ended in an abort
        (
            "transformer_askip_ln_tiny --skip-adapt gradient",
            "pytorch_ddp",
            "forks",
        ),  # with norms that it does not use
    ],
    ids=["rskip", "batch-norm", "askip"],
)
def test_two_processes_equal_one_with_update_freq_2(
    tiny_corpus, tmp_path, arch, ddp_backend, launcher
):
    """Loss and weights agree, those with batch normalisation too.

    It takes each process's own batch, as each of the accumulated batches is its own. Its running
    statistics are each process's own (the checkpoint holds the first one's). The first process
    alone writes what --skip-log-interval measures.
    """
    one_losses, one = train(tiny_corpus, tmp_path / "one", arch, ddp_backend, "none")
    two_losses, two = train(tiny_corpus, tmp_path / "two", arch, ddp_backend, launcher)
    if launcher == "torchrun":
        assert len(list((tmp_path / "two" / "events" / "skip").iterdir())) == 2
        actual = skip_lines(tmp_path / "two" / "events" / "skip" / "skips.jsonl")
        assert actual.keys() == set(range(1, 7)) and all(
            len(values) == 90 for values in actual.values()
        )
    assert len(one_losses) >= 6
    assert two_losses == pytest.approx(one_losses, abs=2e-3)
    assert one_losses[5] < one_losses[0]
    assert one.keys() == two.keys()
    for name in one:
        if not name.endswith(
            ("running_mean", "running_var", "num_batches_tracked", "_float_tensor")
        ):
            torch.testing.assert_close(
                two[name], one[name], rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
