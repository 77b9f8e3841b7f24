"""What needs CUDA, or with RSKIP_TEST_DEVICE=cpu its rehearsal on the CPU.

That is the Triton kernels and the skips against float64 on the CPU, half-precision training with
fairseq's trainer, and what train_cifar.py does on a GPU.
"""

import os

import eq4
import pytest
import test_ops
import torch
from fairseq import options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from skip_variants import CASE_NAMES, CASES, draw, gradients
from transformer_helpers import ALL_TINY
from vision_helpers import stop_at, train

from fairseq_rskip import ops
from fairseq_rskip.ops import in_use, should_fuse, skip_norm
from fairseq_rskip.vision import trainer as vision
from fairseq_rskip.vision.batches import Augmenter, BatchStream, channel_statistics
from fairseq_rskip.vision.config import Config
from fairseq_rskip.vision.data import load

DEVICE = os.environ.get("RSKIP_TEST_DEVICE", "cuda")
missing = DEVICE == "cuda" and not torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(missing, reason="needs a CUDA GPU")]


def gpu_only(*values):
    """A parameter of a test that is left out on the CPU."""
    return pytest.param(
        *values, marks=pytest.mark.skipif(DEVICE == "cpu", reason="fp16 needs a GPU")
    )


SOME = ["transformer_rskip_ln_tiny", "transformer_askip_ln_tiny", "transformer_hyper_tiny"]
AMP = ["off", "bf16", gpu_only("fp16")]
ROWS = test_ops.CASES | {
    name: ((9, 100), 2, {"branch_scale": 0.1}, kinds) for name, kinds in test_ops.MIXED.items()
}


def losses(data, arch, precision):
    """Return the loss of 30 updates on one batch, and the weights after them.

    Losses of the updates that fp16's loss scale skips are left out.
    """
    argv = [str(data), "--arch", arch, precision]
    argv += "--optimizer adam --lr 0.003 --max-tokens 600 --clip-norm 1.0".split()
    argv += ["--fp16-init-scale", "4"]
    if DEVICE == "cpu":
        argv.append("--cpu")
    if arch == "transformer_xskip_tiny":
        argv += ["--skip-lambda", "1"]  # larger ones grow out of fp16
    cfg = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(options.get_training_parser(), argv)
    )
    utils.set_torch_seed(3)
    task = tasks.setup_task(cfg.task)
    task.load_dataset("train")
    model = task.build_model(cfg.model)
    trainer = Trainer(cfg, task, model, task.build_criterion(cfg.criterion))
    batch = next(iter(trainer.get_train_iterator(1).next_epoch_itr(shuffle=False)))
    trainer.lr_step_begin_epoch(1)
    actual = []
    for _ in range(30):
        with metrics.aggregate(new_root=True):
            actual.append(trainer.train_step([batch]))
    return [float(each["loss"]) for each in actual if each is not None], model.parameters()


@pytest.mark.parametrize(
    ("arch", "precision", "ops"),
    [
        *(gpu_only(arch, "--fp16", "auto") for arch in ALL_TINY),
        *((arch, "--bf16", "auto") for arch in ALL_TINY),
        *(
            gpu_only(arch, precision, "auto")
            for arch in SOME
            for precision in ("--memory-efficient-fp16", "--amp")
        ),
        *(gpu_only(arch, "--fp16", DEVICE) for arch in SOME),
    ],
)
def test_half_precision_training_lowers_the_loss(tiny_corpus, operators, arch, precision, ops):
    operators(ops)
    seen, weights = losses(tiny_corpus, arch, precision)
    assert len(seen) > 20 and seen[-1] < seen[0] - 0.2
    expected = {"--amp": torch.float32, "--bf16": torch.bfloat16}.get(precision, torch.float16)
    for weight in weights:
        assert weight.isfinite().all() and weight.device.type == DEVICE and weight.dtype == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, gpu_only(torch.float16)], ids=str)
@pytest.mark.parametrize("ops", ["torch", DEVICE])
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_a_skip_agrees_with_float64_on_the_cpu(case, dtype, operators, ops):
    operators(ops)
    shape = (13, *case.shape[1:])
    case = case._replace(shape=shape)
    outcomes = []
    for device, kind in (("cpu", torch.float64), (DEVICE, dtype)):
        skip = case.build().to(device, torch.promote_types(kind, torch.float32))
        mask = None if case.mask() is None else case.mask().to(device)
        x, f, upstream = (draw(shape, seed, dtype).to(device, kind) for seed in (1, 2, 3))
        x.requires_grad_(), f.requires_grad_()
        y = skip(x, f, None, mask)
        assert y.dtype == kind and y.device.type == device
        outcomes.append([t.detach().double().cpu() for t in (y, *gradients(y, upstream, (x, f)))])
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    for expected, actual in zip(*outcomes):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", ROWS)
def test_every_case_equals_eq4_in_float64_and_is_the_same_twice(case, operators):
    shape, steps, options, kinds = (*ROWS[case], (torch.float32,) * 3)[:4]
    operators(DEVICE)
    assert in_use(DEVICE).name == DEVICE
    options = dict(options)
    leaves = test_ops.inputs(shape, steps, kinds, options.pop("biases", not options.get("rms")))
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    moved = [leaf.detach().to(DEVICE).requires_grad_() for leaf in leaves]
    if not should_fuse(*moved[:2], shape[-1], steps):
        pytest.skip(f"torch computes {steps} steps of {shape[-1]} features")
    first, second = (test_ops.evaluate(ops, moved, steps, **options) for _ in range(2))
    assert all(torch.equal(a, b) and a.device.type == DEVICE for a, b in zip(first, second))
    expected = test_ops.evaluate(eq4, wide, steps, **options)
    test_ops.agree([t.cpu() for t in first], expected, max(kinds, key=test_ops.TOLERANCE.get))


def test_compiled_whole(operators):
    operators(DEVICE)
    assert in_use(DEVICE).name == DEVICE
    leaves = [leaf.detach().to(DEVICE).requires_grad_() for leaf in test_ops.inputs((12, 48), 2)]
    y = torch.compile(skip_norm, fullgraph=True)(*leaves[:2], leaves[2:4], leaves[4:])
    actual = [y.detach(), *torch.autograd.grad(y, leaves, test_ops.random(y.shape, 100, y))]
    test_ops.agree(
        [t.cpu() for t in actual],
        [t.double().cpu() for t in test_ops.evaluate(ops, leaves, 2)],
        torch.float32,
    )


def trainer(amp):
    config = Config(
        data="digits", depth=8, batch_size=64, amp=amp, warmup_iterations=5, iterations=400
    )
    group = vision.Group(0, 1, torch.device(DEVICE, 0))
    return vision.Trainer(config, 1, load(config).to(group.device), group)


@pytest.mark.parametrize("amp", AMP)
def test_steps_lower_the_loss_in_the_type_that_amp_names(amp):
    ours, seen = trainer(amp), set()
    ours.module.conv.register_forward_hook(lambda _m, _i, y: seen.add(y.dtype))
    losses = [ours.train_step().item() for _ in range(60)]
    assert seen == {{"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]}
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.5
    assert ours.weights_are_finite() and {p.dtype for p in ours.module.parameters()} == {
        torch.float32
    }


@pytest.mark.skipif(DEVICE == "cpu", reason="fp16 needs a GPU")
def test_the_loss_scale_survives_a_resume():
    first, second = trainer("fp16"), trainer("fp16")
    first.train_step()
    first.scaler.update(new_scale=32.0)
    for _ in range(3):
        first.train_step()
    state = first.scaler.state_dict()
    assert state["scale"] == 32.0 and state["_growth_tracker"] in (
        3,
        4,
    )  # the first step may have overflowed
    second.load_state_dict(first.state_dict())
    assert second.scaler.state_dict() == state and second.scaler.get_scale() == 32.0


@pytest.mark.parametrize("amp", AMP)
def test_a_run_resumes_from_its_checkpoint(tmp_path, capfd, monkeypatch, amp):
    options = {"device": DEVICE, "amp": amp, "save_interval": 1, "iterations": 20, "batch_size": 64}
    with stop_at(monkeypatch, 7):
        assert train(capfd, tmp_path / "run", "digits", **options)[0] == 130
    status, out, error = train(capfd, tmp_path / "run", "digits", resume=True, **options)
    assert status == 0 and "iteration 7" in out, error


def test_augmentation_on_the_gpu_equals_the_cpus():
    images = torch.randint(
        256, (300, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    mean, std = channel_statistics(images)
    for ours, truth in zip(channel_statistics(images.to(DEVICE)), (mean, std)):
        torch.testing.assert_close(ours.cpu(), truth.cpu())
    made = []
    for device in (torch.device("cpu"), torch.device(DEVICE, 0)):
        augmenter = Augmenter((32, 32, 3), mean, std, 4, device)
        stream = BatchStream(300, 128, 3, 4, True, device)
        parts = [augmenter.train(images.to(device), stream.next()) for _ in range(3)]
        made.append(torch.cat([*parts, augmenter.test(images.to(device))]).cpu())
    torch.testing.assert_close(made[1], made[0], atol=1e-6, rtol=1e-6)
