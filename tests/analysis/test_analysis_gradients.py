"""Gradient norms (Figure 3) against autograd, one example at a time."""

import pytest
import torch
import torch.nn.functional as F
from skip_variants import draw
from transformer_helpers import TINY, batch, build, dictionary, pad, randomise, sentences

from fairseq_rskip.analysis.gradients import gradient_norms
from fairseq_rskip.residual import SkipConnection
from fairseq_rskip.tools.resnets import Batch
from fairseq_rskip.tools.resnets import losses as image_losses
from fairseq_rskip.tools.transformers import losses as sentence_losses
from fairseq_rskip.vision.model import preact_resnet


def norms_one_by_one(model, examples, loss):
    """Name -> list of ||dL_i / dy||, each example in a pass of its own, with torch.autograd.grad."""
    outputs, found = {}, {}
    skips = [(name, m) for name, m in model.named_modules() if isinstance(m, SkipConnection)]
    handles = [m.register_forward_hook(lambda _m, _i, y, name=name: outputs.update({name: y})) for name, m in skips]
    for example in examples:
        value = loss(model, example)
        for name, gradient in zip(outputs, torch.autograd.grad(value, list(outputs.values()))):
            found.setdefault(name, []).append(gradient.double().norm())
    for handle in handles:
        handle.remove()
    return {name: torch.stack(values) for name, values in found.items()}


def check(found, expected, rel=1e-9):
    assert list(found) == list(expected)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=rel, atol=0)


@pytest.mark.parametrize("norm", ("layer", "batch"))
def test_resnet_equals_autograd_image_by_image(norm):
    torch.manual_seed(1)
    model = preact_resnet(8, 4, {"kind": "rskip", "skip_lambda": 2, "norm": norm}).double()
    randomise(model)
    x, y = draw((5, 3, 32, 32), 1), torch.tensor([0, 3, 1, 2, 2])
    found = gradient_norms(model.eval(), [Batch(x[:2], y[:2]), Batch(x[2:], y[2:])], image_losses)
    assert all(p.grad is None for p in model.parameters())
    check(found, norms_one_by_one(model, range(5), lambda net, i: F.cross_entropy(net(x[i : i + 1]), y[i : i + 1])))


@pytest.mark.parametrize("arch", ("transformer_rskip_ln_tiny", "transformer_wskip_tiny", "transformer_rskip_bn_tiny"))
def test_transformer_equals_autograd_sentence_by_sentence(arch, exact_attention):
    model = build(arch, dropout=0.3, **TINY).double()
    randomise(model)
    pairs = sentences(lengths=(7, 3, 5))

    def sample(pairs):
        tokens, lengths, previous = batch(pairs)
        inputs = {"src_tokens": tokens, "src_lengths": lengths, "prev_output_tokens": previous}
        return {"net_input": inputs, "target": pad([t for _, t in pairs]), "pad": dictionary().pad()}

    def mean_token_loss(net, pair):
        logits = net(*batch([pair]))[0]
        return F.cross_entropy(logits[0], torch.tensor(pair[1]))

    found = gradient_norms(model.eval(), [sample(pairs)], sentence_losses)
    check(found, norms_one_by_one(model, pairs, mean_token_loss), rel=1e-6)  # fp32 in its loss: 4e-8
