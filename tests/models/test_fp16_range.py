"""What is said of a stream that grows with depth, and of a block that leaves fp16's range."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from transformer_helpers import build

from fairseq_rskip.modules.fp16_range import OverflowWatch, way_out
from fairseq_rskip.residual import create_skip

NARROW = {"encoder_embed_dim": 16, "encoder_ffn_embed_dim": 16}


@pytest.mark.parametrize(
    ("arch", "options", "level", "growth", "verdict"),
    [
        ("xskip", {"skip_lambda": 1.2}, "INFO", "1.2^12 = 8.92", "is within fp16"),
        ("xskip", {"skip_lambda": 1.6}, "WARNING", "1.6^18 = 4.72e+03", "comes close to the limit"),
        ("xskip", {"skip_lambda": 2}, "WARNING", "2^12 = 4.1e+03", "overflows fp16"),
        (
            "xskip",
            {"skip_lambda": "auto", "encoder_layers": 1, "decoder_layers": 16},
            "WARNING",
            "1.41421^2 = 2 through the encoder and 6.9282^48 = 2.24e+40 through the decoder",
            "overflows fp16",
        ),
        # 1.15, 1.13, 1.11, 1.09, 1.07 and 1.05 in the layers
        ("x0", {"skip_x0_init": "nanochat"}, "INFO", "1.15 ... 1 = 1.77", "is within fp16"),
    ],
)
def test_a_stream_that_grows_is_spoken_of_once(caplog, arch, options, level, growth, verdict):
    caplog.set_level(logging.INFO, logger="fairseq_rskip")
    build(f"transformer_{arch}", **NARROW, **options)
    (record,) = [each for each in caplog.records if "grows with depth" in each.getMessage()]
    assert record.levelname == level
    assert growth in record.getMessage() and verdict in record.getMessage()


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("keel", {}),
        ("rskip_ln", {}),
        ("xskip", {"skip_lambda": 1}),
        ("xskip", {"skip_lambda": 0.5}),
    ],
)
def test_a_stream_that_does_not_grow_is_not_spoken_of(caplog, arch, options):
    """A norm follows the sum (Keel's is behind 12 x + F), or λ is at most 1."""
    caplog.set_level(
        logging.INFO, logger="fairseq_rskip"
    )  # growth within fp16 is said at this level
    build(f"transformer_{arch}_tiny", **options)
    assert not [line for line in caplog.messages if "grows with depth" in line]


class Overflowing(torch.nn.Module):
    """Blocks whose outputs have a given largest value."""

    def __init__(self, *largest):
        super().__init__()
        self.largest = largest
        self.blocks = torch.nn.ModuleList(create_skip("xskip", 4, norm="none") for _ in largest)

    def forward(self, _sample):
        for skip, value in zip(self.blocks, self.largest):
            skip(torch.zeros(3, 4), torch.full((3, 4), value))


def watched(model, *scales):
    """Run one training step at each of the loss ``scales``."""
    optimizer = SimpleNamespace(scaler=SimpleNamespace(loss_scale=0.0))

    def train_step(sample, model, criterion, optimizer):
        model(sample)

    watch = OverflowWatch(train_step, model)
    for scale in scales:
        optimizer.scaler.loss_scale = scale
        watch(None, model, None, optimizer)


@pytest.mark.parametrize(
    ("largest", "named"),
    [
        ((32_000.0, 33_000.0), "blocks.1"),  # half of 65,504 is 32,752
        ((33_000.0, 1e9), "blocks.0"),
        ((1.0, math.inf), "blocks.1"),
        ((1.0, math.nan), "blocks.1"),
    ],
)
def test_the_first_block_above_half_of_fp16s_range_is_named(caplog, largest, named):
    model = Overflowing(*largest)
    watched(model, 128.0, 64.0, 32.0)
    assert not any(skip._forward_hooks for skip in model.blocks)
    (warning,) = caplog.messages
    assert warning.startswith(f"the output of {named} reaches ")
    assert warning.endswith(
        "fp16 ends at 65504: expected fp32 or bf16, or --skip-norm layer, or a smaller "
        "--skip-lambda"
    )


def test_a_block_below_half_of_fp16s_range_is_not_named(caplog):
    watched(Overflowing(32_000.0), 128.0, 64.0)
    assert not caplog.messages


def test_no_block_is_named_while_the_loss_scale_does_not_fall(caplog):
    watched(Overflowing(math.inf), 64.0, 64.0, 128.0)
    assert not caplog.messages


def test_a_way_out_of_fp16s_range_is_an_option_that_the_rule_has():
    assert way_out(create_skip("rezero", 4)) == "fp32 or bf16"
    assert way_out(create_skip("preln", 4)) == "fp32 or bf16, or a smaller --skip-lambda"
