"""torch's nn.TransformerEncoderLayer with skip connections of your choice in place of its two
residuals.
"""

import torch
from torch import nn

from fairseq_rskip.residual import Place, Weight, create_skip


class SkipEncoderLayer(nn.TransformerEncoderLayer):
    """Layer ``index`` of ``depth``, with ``batch_first``; ``skip``: arguments of ``create_skip``.

    ``options`` are torch's but norm_first, which the rule decides: kind="preln". torch's own
    nn.TransformerEncoder would take a fused path around ``forward``: put the layers in an
    nn.Sequential.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        *sizes,
        index: int = 0,
        depth: int = 1,
        skip: dict,
        **options,
    ):
        if "norm_first" in options:
            raise ValueError('norm_first: expected skip={"kind": "preln"} for pre-norm')
        super().__init__(d_model, nhead, *sizes, batch_first=True, **options)
        weight = self.linear1.weight
        skip = {"eps": self.norm1.eps, "device": weight.device, "dtype": weight.dtype, **skip}
        self.norm1 = self.norm2 = None  # of the skip connections now
        skips = []
        for position, sublayer in enumerate(("self_attn", "ffn")):
            place = Place(
                "encoder", sublayer, index=index, depth=depth, position=position, sublayers=2
            )
            skips.append(create_skip(dim=d_model, place=place, batch_dim=0, **skip))
            skips[-1].initialise(self.branch_weights(sublayer))
        skips[1].share_with(skips[0])
        self.attention_skip, self.feed_forward_skip = skips

    def branch_weights(self, sublayer: str) -> dict[str, Weight]:
        """The weights of a sublayer, with the standard deviation that torch draws them with: for
        rules that rescale.
        """
        linears = {"fc1": self.linear1, "fc2": self.linear2}
        if sublayer == "self_attn":
            linears = {"out": self.self_attn.out_proj}
        branch = {
            role: Weight(m.weight, (3 * m.in_features) ** -0.5, m.bias)
            for role, m in linears.items()
        }
        if sublayer == "self_attn":
            std = (2 * self.self_attn.embed_dim) ** -0.5  # Xavier's, of q, k and v as one matrix
            d_model = self.self_attn.embed_dim
            for number, role in enumerate("qkv"):
                rows = slice(number * d_model, (number + 1) * d_model)
                branch[role] = Weight(self.self_attn.in_proj_weight, std, rows=rows)
        return branch

    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        """``src``: (batch, seq_len, d_model); the masks are torch's."""
        h, carried = self.attention_skip.prepare(src)
        f_x = self._sa_block(h, src_mask, src_key_padding_mask, is_causal=is_causal)
        x = self.attention_skip(src, f_x, carried, src_key_padding_mask)
        h, carried = self.feed_forward_skip.prepare(x)
        return self.feed_forward_skip(x, self._ff_block(h), carried, src_key_padding_mask)


if __name__ == "__main__":
    layers = [
        SkipEncoderLayer(64, 4, index=i, depth=6, skip={"kind": "rskip", "skip_lambda": 2})
        for i in range(6)
    ]
    print(nn.Sequential(*layers)(torch.randn(2, 10, 64)).shape)
