"""What train_cifar.py does on CUDA: mixed precision that learns, a scaler that survives, augmentation there."""

import pytest
import torch
from device import DEVICE, NEEDS_DEVICE, gpu_only
from vision_helpers import stop_at, train

from fairseq_rskip.vision.batches import Augmenter, BatchStream, channel_statistics
from fairseq_rskip.vision.config import Config
from fairseq_rskip.vision.data import load
from fairseq_rskip.vision.trainer import Group, Trainer

pytestmark = NEEDS_DEVICE
AMP = ["off", "bf16", gpu_only("fp16")]


def trainer(amp):
    config = Config(data="digits", depth=8, batch_size=64, amp=amp, warmup_iterations=5, iterations=400)
    group = Group(0, 1, torch.device(DEVICE, 0))
    return Trainer(config, 1, load(config).to(group.device), group)


@pytest.mark.parametrize("amp", AMP)
def test_steps_lower_the_loss_in_the_type_that_amp_names(amp):
    ours, seen = trainer(amp), set()
    ours.module.conv.register_forward_hook(lambda _m, _i, y: seen.add(y.dtype))
    losses = [ours.train_step().item() for _ in range(60)]
    assert seen == {{"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]}
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.5
    assert ours.weights_are_finite() and {p.dtype for p in ours.module.parameters()} == {torch.float32}


@pytest.mark.skipif(DEVICE == "cpu", reason="fp16 needs a GPU")
def test_the_loss_scale_survives_a_resume():
    first, second = trainer("fp16"), trainer("fp16")
    first.train_step()
    first.scaler.update(new_scale=32.0)
    for _ in range(3):
        first.train_step()
    state = first.scaler.state_dict()
    assert state["scale"] == 32.0 and state["_growth_tracker"] in (3, 4)  # the first step may have overflowed
    second.load_state_dict(first.state_dict())
    assert second.scaler.state_dict() == state and second.scaler.get_scale() == 32.0


@pytest.mark.parametrize("amp", AMP)
def test_a_run_resumes_from_its_checkpoint(tmp_path, capfd, monkeypatch, amp):
    options = {"device": DEVICE, "amp": amp, "save_interval": 1, "iterations": 20, "batch_size": 64}
    with stop_at(monkeypatch, 7):
        assert train(capfd, tmp_path / "run", "digits", **options)[0] == 130
    status, out, error = train(capfd, tmp_path / "run", "digits", resume=True, **options)
    assert status == 0 and "iteration 7" in out, error


@pytest.mark.parametrize("padding", ["mean", "black"])
@pytest.mark.parametrize("channels_last", [True, False])
def test_augmentation_on_the_gpu_equals_the_cpus(padding, channels_last):
    images = torch.randint(256, (300, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    mean, std = channel_statistics(images)
    for ours, truth in zip(channel_statistics(images.to(DEVICE)), (mean, std)):
        torch.testing.assert_close(ours.cpu(), truth.cpu())
    made = []
    for device in (torch.device("cpu"), torch.device(DEVICE, 0)):
        augmenter = Augmenter((32, 32, 3), mean, std, 4, padding, channels_last, device)
        stream = BatchStream(300, 128, 3, 4, True, device)
        parts = [augmenter.train(images.to(device), stream.next()) for _ in range(3)]
        made.append(torch.cat([*parts, augmenter.test(images.to(device))]).cpu())
    torch.testing.assert_close(made[1], made[0], atol=1e-6, rtol=1e-6)
