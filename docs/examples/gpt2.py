"""Hugging Face's GPT-2 with skip connections of your choice in place of the two additions of each
block.
"""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from fairseq_rskip.residual import Place, create_skip


class SkipBlock(nn.Module):
    """``block`` ``index`` of a GPT-2 over skip connections; ``skip``: arguments of ``create_skip``.

    A norm before the branch starts with the block's. The rule does not rescale its branch at the
    start (``SkipConnection.initialise``): GPT-2 keeps q, k and v in one transposed matrix.
    """

    def __init__(self, block: nn.Module, index: int, config: GPT2Config, skip: dict):
        super().__init__()
        self.attn, self.mlp, skips = block.attn, block.mlp, []
        for position, norm in enumerate((block.ln_1, block.ln_2)):
            name = ("self_attn", "ffn")[position]
            place = Place(
                "decoder", name, index=index, depth=config.n_layer, position=position, sublayers=2
            )
            skips.append(
                create_skip(
                    dim=config.n_embd,
                    place=place,
                    batch_dim=0,
                    eps=config.layer_norm_epsilon,
                    **skip,
                )
            )
            if skips[-1].pre is not None:
                skips[-1].pre.load_state_dict(norm.state_dict())
        skips[1].share_with(skips[0])  # for rules with one number a layer
        self.attention_skip, self.feed_forward_skip = skips

    def forward(self, hidden_states, past_key_values=None, attention_mask=None, *_, **options):
        h, carried = self.attention_skip.prepare(hidden_states)
        f_x = self.attn(
            h, past_key_values=past_key_values, attention_mask=attention_mask, **options
        )[0]
        x = self.attention_skip(hidden_states, f_x, carried)
        h, carried = self.feed_forward_skip.prepare(x)
        return self.feed_forward_skip(x, self.mlp(h), carried)


def with_skips(model: GPT2LMHeadModel, **skip) -> GPT2LMHeadModel:
    """``model``, fresh or pretrained, with its blocks replaced; ``kind="preln"`` changes
    nothing.
    """
    blocks = model.transformer.h
    for index, block in enumerate(blocks):
        blocks[index] = SkipBlock(block, index, model.config, skip)
    return model


if __name__ == "__main__":
    model = with_skips(
        GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=64, n_head=4)), kind="rskip", skip_lambda=2
    )
    print(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, pad_token_id=0))
