"""Order, augmentation and learning rate.

They are compared with torchvision's transforms for the same draws, and with values by hand.
"""

import pytest
import torch
from torchvision import transforms
from torchvision.transforms import functional as tv

from fairseq_rskip.vision.batches import Augmenter, Batch, BatchStream, channel_statistics
from fairseq_rskip.vision.config import Config

CPU = torch.device("cpu")


def random_images(count, seed=0):
    return torch.randint(
        256, (count, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def stream(size=10, batch_size=4, seed=5, crop=4, flip=True):
    return BatchStream(size, batch_size, seed, crop, flip, CPU)


@pytest.mark.parametrize("crop", [0, 4])
def test_equals_torchvision_for_the_same_draws(crop):
    images = random_images(40)
    mean, std = channel_statistics(images)
    augmenter = Augmenter((32, 32, 3), mean, std, crop, CPU)
    corners = 2 * crop + 1
    batch = Batch(
        torch.arange(40).flip(0),
        torch.arange(40) % corners,
        torch.arange(40) // 5 % corners,
        torch.arange(40) % 2 == 0,
    )
    got = augmenter.train(images, batch)
    normalise = transforms.Normalize(mean.tolist(), std.tolist())
    for k, (index, top, left, flip) in enumerate(zip(*(part.tolist() for part in batch))):
        image = tv.pad(normalise(transforms.ToTensor()(images[index].numpy())), crop)
        image = tv.crop(image, top, left, 32, 32)
        torch.testing.assert_close(got[k], tv.hflip(image) if flip else image, atol=1e-6, rtol=0)
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_test_images_are_normalised_by_the_training_images_statistics():
    images = random_images(30)
    images[:, :, :, 1] //= 3
    mean, std = channel_statistics(images)
    values = images.double().view(-1, 3) / 255
    torch.testing.assert_close(mean.double(), values.mean(0), atol=1e-7, rtol=0)
    torch.testing.assert_close(std.double(), values.std(0, unbiased=False), atol=1e-7, rtol=0)
    got = Augmenter((32, 32, 3), mean, std, 4, CPU).test(images)
    expected = transforms.Normalize(mean.tolist(), std.tolist())(images.permute(0, 3, 1, 2) / 255)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


def test_draws_are_distributed_as_torchvision_draws_them():
    """RandomCrop.get_params: corners uniform in 0..8; RandomHorizontalFlip: half."""
    batch = stream(size=90_000, batch_size=90_000).next()
    for corner in (batch.top, batch.left):
        counts = torch.bincount(corner, minlength=9)
        assert len(counts) == 9
        chi_squared = ((counts - 10_000).double() ** 2 / 10_000).sum()
        assert chi_squared < 26.1  # 8 degrees of freedom, p = 0.001
    assert abs(batch.flip.double().mean() - 0.5) < 0.006


def test_each_pass_shows_every_example_once_and_batches_run_on():
    batches = stream(size=10, batch_size=4)
    seen = torch.cat([batches.next().index for _ in range(15)])
    assert len(seen) == 60
    orders = [chunk.tolist() for chunk in seen.split(10)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 6


def test_the_papers_schedule():
    config = Config()
    rates = [config.learning_rate(i) for i in (0, 399, 400, 31_999, 32_000, 47_999, 48_000, 63_999)]
    assert rates == [0.01, 0.01, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    assert (config.batch_size, config.momentum, config.weight_decay, config.crop) == (
        128,
        0.9,
        2e-4,
        4,
    )


def test_the_warm_up_follows_the_length_of_the_run_unless_given():
    lengths = {30: 0, 300: 2, 2000: 12, 64_000: 400, 128_000: 400}
    assert {n: Config(iterations=n).warmup_iterations for n in lengths} == lengths
    assert Config(iterations=300, warmup_iterations=100).learning_rate(99) == 0.01


def test_milestones_follow_the_length_of_the_run_unless_given():
    assert Config(iterations=800, warmup_iterations=9).all_milestones() == (400, 600)
    assert Config(milestones=(500, 900)).learning_rate(899) == 0.01
    config = Config(lr=1.0, warmup_lr=0.5, warmup_iterations=2, milestones=(4, 5), lr_factor=0.25)
    assert [config.learning_rate(i) for i in range(6)] == [0.5, 0.5, 1.0, 1.0, 0.25, 0.0625]
