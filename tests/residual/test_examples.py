"""docs/examples: the module in other packages' models.

These equal the packages' own models with the rule that they have.
"""

import copy
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples"


def example(name, package="torch"):
    pytest.importorskip(package, reason=f"docs/examples/{name}.py needs the package {package}")
    path = FOLDER / f"{name}.py"
    runpy.run_path(str(path), run_name="__main__")
    return runpy.run_path(str(path))


@pytest.mark.parametrize("kind", ["post-norm", "pre-norm"])
def test_torchs_encoder_layer(kind, stock_operators):
    layer = example("encoder_layer")["SkipEncoderLayer"]
    torch.manual_seed(1)
    theirs = nn.TransformerEncoderLayer(
        16, 2, 32, 0.1, batch_first=True, norm_first=kind == "pre-norm"
    )
    torch.manual_seed(1)
    skip = {"kind": "xskip", "skip_lambda": 1.0} if kind == "post-norm" else {"kind": "preln"}
    ours = layer(16, 2, dim_feedforward=32, dropout=0.1, skip=skip)
    x, mask = torch.randn(3, 5, 16), torch.arange(5) >= torch.tensor([[5], [3], [4]])
    actual = []
    for model in (theirs, ours):
        torch.manual_seed(2)
        actual.append(model(x, src_key_padding_mask=mask))
    torch.testing.assert_close(*actual, rtol=1e-5, atol=1e-6)
    deep = layer(16, 2, index=0, depth=8, skip={"kind": "deepnorm"})
    weight = deep.self_attn.in_proj_weight.detach().chunk(3)
    assert float(weight[2].std() / weight[0].std()) == pytest.approx(64**-0.25, rel=0.15)


def test_torchs_encoder_layer_keeps_its_options():
    layer = example("encoder_layer")["SkipEncoderLayer"]
    skip = {"kind": "xskip"}
    made = layer(16, 2, 32, layer_norm_eps=1e-3, dtype=torch.float64, skip=skip)
    norm = made.attention_skip.post[0]
    assert norm.eps == 1e-3 and {p.dtype for p in made.parameters()} == {torch.float64}
    with pytest.raises(ValueError, match='^norm_first: expected skip={"kind": "preln"}'):
        layer(16, 2, norm_first=True, skip=skip)


@pytest.mark.parametrize("moved", [nn.Module.double, copy.deepcopy])
def test_ngpt_knows_its_matrices_where_they_are_moved_to(moved):
    layer = moved(example("encoder_layer")["SkipEncoderLayer"](16, 2, 32, skip={"kind": "ngpt"}))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(3)
    layer.attention_skip.to_unit_length()
    layer.feed_forward_skip.to_unit_length()
    attention, matrices = layer.self_attn, {}
    matrices[1] = torch.cat([attention.in_proj_weight, layer.linear1.weight])
    matrices[0] = torch.cat([attention.out_proj.weight, layer.linear2.weight], 1)
    for axis, matrix in matrices.items():
        length = matrix.norm(dim=axis)
        torch.testing.assert_close(length, torch.ones_like(length))


def test_gpt2_of_hugging_face():
    module = example("gpt2", "transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        vocab_size=50,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=1,
    )
    theirs = GPT2LMHeadModel(config).eval()
    tokens = torch.randint(50, (2, 7))
    with torch.no_grad():
        expected, generated = (
            theirs(tokens).logits,
            theirs.generate(tokens, max_new_tokens=4, do_sample=False),
        )
        ours = module["with_skips"](theirs, kind="preln")
        torch.testing.assert_close(ours(tokens).logits, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(ours.generate(tokens, max_new_tokens=4, do_sample=False), generated)
    recursive = module["with_skips"](GPT2LMHeadModel(config), kind="rskip", skip_lambda=2)
    recursive(tokens, labels=tokens).loss.backward()
    assert recursive.transformer.h[0].attention_skip.post[1].weight.grad.abs().sum() > 0
    block = module["with_skips"](GPT2LMHeadModel(config), kind="rezero").transformer.h[0]
    assert block.feed_forward_skip.weight is block.attention_skip.weight  # one number a layer


def test_vision_transformer_of_timm():
    module = example("vit_block", "timm.models.vision_transformer")
    from timm.models.vision_transformer import VisionTransformer

    options = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "num_heads": 2, "num_classes": 5}
    theirs = VisionTransformer(depth=2, **options).eval()
    ours = module["vit"](2, skip={"kind": "preln"}, **options).eval()
    names = {f"norm{i}.": f"skip{i}.pre." for i in (1, 2)}
    state = theirs.state_dict()
    for stock, name in names.items():
        state = {
            key.replace(stock, name) if "blocks" in key else key: value
            for key, value in state.items()
        }
    ours.load_state_dict(state)
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-5, atol=1e-5)
    assert [block.skip1.place.block_number for block in ours.blocks] == [1, 3]
    block = module["vit"](2, skip={"kind": "rezero"}, **options).blocks[0]
    assert block.skip2.weight is block.skip1.weight  # one number a layer
