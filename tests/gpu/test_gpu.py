"""What needs CUDA: half-precision training with fairseq's trainer, and skips that agree with their CPU result."""

import pytest
import torch
from device import DEVICE, NEEDS_DEVICE, gpu_only
from fairseq import options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from skip_variants import CASE_NAMES, CASES, draw, gradients
from transformer_helpers import ALL_TINY

pytestmark = NEEDS_DEVICE
SOME = ["transformer_rskip_ln_tiny", "transformer_askip_ln_tiny", "transformer_hyper_tiny"]


def losses(data, arch, precision):
    """Loss of 30 updates on one batch, those left out that fp16's loss scale skips, and the weights after them."""
    argv = [str(data), "--arch", arch, precision, "--optimizer", "adam", "--lr", "0.003", "--max-tokens", "600"]
    argv += ["--clip-norm", "1.0", "--fp16-init-scale", "4", *(["--cpu"] if DEVICE == "cpu" else [])]
    argv += ["--skip-lambda", "1"] if arch == "transformer_xskip_tiny" else []  # larger ones grow out of fp16
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), argv))
    utils.set_torch_seed(3)
    task = tasks.setup_task(cfg.task)
    task.load_dataset("train")
    model = task.build_model(cfg.model)
    trainer = Trainer(cfg, task, model, task.build_criterion(cfg.criterion))
    batch = next(iter(trainer.get_train_iterator(1).next_epoch_itr(shuffle=False)))
    trainer.lr_step_begin_epoch(1)
    found = []
    for _ in range(30):
        with metrics.aggregate(new_root=True):
            found.append(trainer.train_step([batch]))
    return [float(each["loss"]) for each in found if each is not None], model.parameters()


@pytest.mark.parametrize(
    ("arch", "precision"),
    [
        *(gpu_only(arch, "--fp16") for arch in ALL_TINY),
        *((arch, "--bf16") for arch in ALL_TINY),
        *(gpu_only(arch, precision) for arch in SOME for precision in ("--memory-efficient-fp16", "--amp")),
    ],
)
def test_half_precision_training_lowers_the_loss(tiny_corpus, arch, precision):
    seen, weights = losses(tiny_corpus, arch, precision)
    assert len(seen) > 20 and seen[-1] < seen[0] - 0.2
    expected = {"--amp": torch.float32, "--bf16": torch.bfloat16}.get(precision, torch.float16)
    for weight in weights:
        assert weight.isfinite().all() and weight.device.type == DEVICE and weight.dtype == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, gpu_only(torch.float16)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
def test_a_skip_agrees_with_float64_on_the_cpu(case, dtype):
    shape = (13, *case.shape[1:])
    case = case._replace(shape=shape)
    outcomes = []
    for device, kind in (("cpu", torch.float64), (DEVICE, dtype)):
        skip = case.build().to(device, torch.promote_types(kind, torch.float32))
        mask = None if case.mask() is None else case.mask().to(device)
        x, f, upstream = (draw(shape, seed, dtype).to(device, kind) for seed in (1, 2, 3))
        x.requires_grad_(), f.requires_grad_()
        y = skip(x, f, mask)
        assert y.dtype == kind and y.device.type == device
        outcomes.append([t.detach().double().cpu() for t in (y, *gradients(y, upstream, (x, f)))])
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    for expected, found in zip(*outcomes):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
