"""fairseq-train --weight-decay: what skip connections learn does not decay.

That is so whatever holds the parameters.
"""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run_checked
from fairseq.optim.adam import Adam
from fairseq.optim.nag import NAG
from transformer_helpers import batch, build, sentences

from fairseq_rskip.compat import load_checkpoint
from fairseq_rskip.modules.parameter_groups import ParameterGroups
from fairseq_rskip.modules.step_hooks import attach
from fairseq_rskip.parameters import without_decay
from fairseq_rskip.residual import create_skip, skips

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


def train(corpus, save_dir, decay, *options):
    """A real fairseq-train of one update, learning rate 0.01: its last checkpoint."""
    command = [
        "python-with-fairseq",
        ON_A_CPU,
        corpus,
        "--user-dir",
        ROOT / "fairseq_rskip",
        "--cpu",
    ]
    command += (
        "--arch transformer_laurel_tiny --encoder-embed-dim 32 --encoder-ffn-embed-dim 32".split()
    )
    command += "--optimizer adam --lr 0.01 --max-tokens 400 --max-update 1 --num-workers 0".split()
    command += (
        "--source-lang src --target-lang tgt --disable-validation --no-epoch-checkpoints".split()
    )
    command += ["--weight-decay", decay, "--fp16-init-scale", 4, "--save-dir", save_dir, *options]
    log = run_checked(command)
    assert "--weight-decay also shrinks" not in log
    return load_checkpoint(save_dir / "checkpoint_last.pt")


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_update_shrinks_gains_but_not_coefficients(tiny_corpus, tmp_path, precision):
    """All of them start at 1, where 0.01 * 0.5 of decay is five times what fp16 resolves."""
    options = PRECISIONS[precision]
    plain, decayed = (
        train(tiny_corpus, tmp_path / str(decay), decay, *options) for decay in (0.0, 0.5)
    )
    for name, value in plain["model"].items():
        difference = decayed["model"][name].float() - value.float()
        if name.endswith(("skip_weight", "branch_weight", "skip.low", "skip.high")):
            assert torch.allclose(
                difference, torch.zeros(()), rtol=0, atol=1e-3 if options else 0
            ), name
        elif ".post." in name and name.endswith("weight"):
            assert torch.allclose(
                difference, torch.tensor(-0.005), rtol=0, atol=1e-3 if options else 1e-6
            ), name
    (group,) = decayed["last_optimizer_state"]["param_groups"]
    assert group["weight_decay"] == 0.5
    assert len(group["params"]) == len(plain["last_optimizer_state"]["param_groups"][0]["params"])


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_ngpts_vectors_have_length_1_after_an_update(tiny_corpus, tmp_path, precision):
    options = ["--arch", "transformer_ngpt_tiny", "--lr", 0.1, *PRECISIONS[precision]]
    saved = train(tiny_corpus, tmp_path, 0.0, *options)["model"]
    matrices = [
        (name, w.float()) for name, w in saved.items() if ".layers." in name and w.dim() == 2
    ]
    assert len(matrices) == 32
    for name, matrix in matrices:
        lengths = matrix.norm(dim=0 if "out_proj" in name or "fc2" in name else 1)
        assert torch.allclose(lengths, torch.ones(()), atol=1e-3), name


def model_of(kind):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 5), create_skip(kind, 5), create_skip("wskip", 5))


def wrapped(*optimizers):
    """What fairseq's optimizers look like from outside: one, or a composite."""
    if len(optimizers) == 1:
        return SimpleNamespace(optimizer=optimizers[0])
    parts = {str(k): SimpleNamespace(optimizer=optimizer) for k, optimizer in enumerate(optimizers)}
    return SimpleNamespace(optimizer=SimpleNamespace(optimizers=parts))


OPTIMIZERS = {
    "adam": lambda groups, decay: Adam(groups, lr=0.1, weight_decay=decay),
    "nag": lambda groups, decay: NAG(
        groups, lr=0.1, momentum=0.9, weight_decay=decay
    ),  # counts in its groups
    "sgd": lambda groups, decay: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=decay),
}


@pytest.mark.parametrize("made", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("decay", [0.0, 0.5], ids=["none", "half"])
def test_steps_are_those_of_groups_that_the_optimizer_has_from_the_start(made, decay):
    """Coefficients of laurel apart; wskip's weight decays, as in the paper."""
    results = []
    for apart in (True, False):
        model = model_of("laurel")
        kept = without_decay(model)
        rest = [p for p in model.parameters() if all(p is not q for q in kept)]
        assert len(kept) == 4 and any(p is model[2].weight for p in rest)
        if apart:
            optimizer = made([{"params": rest}, {"params": kept, "weight_decay": 0.0}], decay)
            step = optimizer.step
        else:
            optimizer = made(list(model.parameters()), decay)
            groups = optimizer.param_groups
            step = partial(ParameterGroups(lambda o: o.optimizer.step(), model), wrapped(optimizer))
        for k in range(3):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (k + 1)
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.1 + k)
            step()
        results.append(model.state_dict())
    assert optimizer.param_groups is groups and [len(group["params"]) for group in groups] == [
        len(results[0])
    ]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_the_parts_of_a_composite_optimizer():
    model = model_of("laurel")
    parts = [torch.optim.SGD(part.parameters(), lr=1.0, weight_decay=0.5) for part in model]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ParameterGroups(lambda o: [part.step() for part in parts], model)(wrapped(*parts))
    kept = {f"1.{name}" for name in model[1].learned()}
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] * (1 if name in kept else 0.5)), name


MIXING = ("hyper", "mhc", "ihc", "gated_residual", "fractional", "x0")
MIXING += ("dlcl", "denseformer", "mudd", "attnres", "mhar", "delta_attnres")
MIXING += ("ohc", "jpmhc", "multi_gate", "single_pass_mhc")


@pytest.mark.parametrize("kind", MIXING)
def test_weight_decay_leaves_the_mixing_of_streams_alone(kind):
    """Static matrices decayed towards 0 would shrink every stream with each block.

    All else is halved.
    """
    model = build(f"transformer_{kind}_tiny")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: value.clone() for name, value in model.named_parameters()}
    ParameterGroups(lambda o: o.optimizer.step(), model)(wrapped(optimizer))

    kept = {f"{place}.{name}" for place, skip in skips(model).items() for name in skip.learned()}
    assert kept
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name] * (1 if name in kept else 0.5)), name


@pytest.mark.parametrize("kind", ["hyper", "mhc", "fractional"])
def test_training_under_large_weight_decay_is_finite_and_keeps_mixing(kind):
    """Ten updates that take a tenth of every other weight each, where others report NaN."""
    model = build(f"transformer_{kind}_tiny")
    static = {
        name: value
        for name, value in model.named_parameters()
        if name.rpartition(".")[2] in ("a_r", "b_res", "a_m", "b")
    }
    before = {name: value.detach().clone() for name, value in static.items()}
    matrix = model.encoder.layers[0].fc1.weight
    size = float(matrix.detach().norm())
    optimizer = Adam(list(model.parameters()), lr=1e-3, weight_decay=100.0)
    step = ParameterGroups(lambda o: o.optimizer.step(), model)
    source, lengths, previous = batch(sentences())
    for _ in range(10):
        logits = model(source, lengths, previous)[0]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), previous.flatten())
        assert torch.isfinite(loss)
        optimizer.zero_grad()
        loss.backward()
        step(wrapped(optimizer))
    assert float(matrix.detach().norm()) < 0.5 * size  # 0.9^10 is 0.35
    assert len(static) >= 10
    for name, value in static.items():
        # ten steps of at most 0.001 x 1.1 each; decay would take 65 %
        torch.testing.assert_close(value.detach(), before[name], rtol=0, atol=0.02)


@pytest.mark.parametrize(("kind", "watched"), [("rezero", True), ("rskip_ln", False)])
def test_fully_sharded_layers_keep_their_warning(monkeypatch, kind, watched):
    """fairscale takes the parameters out of the skip connections before the training is wrapped."""
    monkeypatch.setitem(sys.modules, "fairseq.trainer", torch)
    model = build(f"transformer_{kind}_tiny")
    for skip in skips(model).values():
        skip._parameters.clear()
    task = SimpleNamespace(train_step=None, optimizer_step=None, load_dataset=None)
    attach(task, model, 0)
    assert isinstance(task.optimizer_step, ParameterGroups) == watched
