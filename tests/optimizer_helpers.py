"""What the tests of optimizers share: a small model, optimizers, a training of fairseq-train."""

from functools import partial
from types import SimpleNamespace

import torch
from conftest import ROOT, run_checked
from fairseq.optim.adafactor import Adafactor
from fairseq.optim.adam import Adam
from fairseq.optim.adamax import Adamax
from fairseq.optim.nag import NAG

from fairseq_rskip.compat import load_checkpoint
from fairseq_rskip.residual import create_skip

# --fp16 asks for the GPU of its flat parameters
ON_A_CPU = (
    "import sys, torch; torch.cuda.current_device = lambda: None; "
    "sys.argv[:2] = ['fairseq-train']; from fairseq_cli.train import cli_main; cli_main()"
)
PRECISIONS = {
    "fp32": [],
    "flat": ["--fp16"],
    "parts": ["--fp16", "--fp16-no-flatten-grads"],
    "fp16": ["--fp16", "--memory-efficient-fp16"],
}
OPTIMIZERS = {
    "adam": partial(Adam, lr=0.1),
    "adamax": partial(Adamax, lr=0.1),
    "adagrad": lambda groups, weight_decay: torch.optim.Adagrad(
        groups, lr=0.1, weight_decay=weight_decay
    ),
    "nag": partial(NAG, lr=0.1, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adafactor": partial(Adafactor, lr=0.1, relative_step=False),
}


def small_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    skips = create_skip("laurel", 5), create_skip("wskip", 5)
    return torch.nn.Sequential(torch.nn.Linear(5, 5), *skips)


def wrapped(*optimizers):
    """What fairseq's optimizers look like from outside: one, or a composite."""
    if len(optimizers) == 1:
        return SimpleNamespace(optimizer=optimizers[0])
    parts = {str(k): SimpleNamespace(optimizer=optimizer) for k, optimizer in enumerate(optimizers)}
    return SimpleNamespace(optimizer=SimpleNamespace(optimizers=parts))


def train(corpus, save_dir, arch, *more):
    """A real fairseq-train with learning rate 0.01: its last checkpoint."""
    command = ["python-with-fairseq", ON_A_CPU, corpus, "--user-dir", ROOT / "fairseq_rskip"]
    command += ["--arch", arch, *"--cpu --encoder-embed-dim 32 --encoder-ffn-embed-dim 32".split()]
    command += "--lr 0.01 --max-tokens 400 --num-workers 0".split()
    command += "--source-lang src --target-lang tgt --disable-validation".split()
    command += ["--no-epoch-checkpoints", "--fp16-init-scale", 4, "--save-dir", save_dir, *more]
    log = run_checked(command)
    assert "--weight-decay also shrinks" not in log
    return load_checkpoint(save_dir / "checkpoint_last.pt")


def flat_copy(model):
    """What fairseq's fp16 optimizer holds of ``model``: one flat parameter; here in float64."""
    parameters = list(model.parameters())
    flat = torch.nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
    flat.grad = torch.zeros_like(flat)
    return parameters, flat
