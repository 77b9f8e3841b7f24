"""timm's Vision Transformer with skip connections of your choice in place of the two additions of
each block.
"""

from functools import partial

import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from fairseq_rskip.residual import Place, create_skip


class SkipBlock(Block):
    """Block ``depth`` (timm: its number) of ``blocks``; ``skip``: arguments of ``create_skip``.

    The rule does not rescale its branch at the start (``SkipConnection.initialise``): timm draws
    the weights after the blocks are built.
    """

    def __init__(self, dim: int, *arguments, blocks: int, skip: dict, depth: int = 0, **options):
        super().__init__(dim, *arguments, depth=depth, **options)
        skips = []
        for position, name in enumerate(("self_attn", "ffn")):
            place = Place(
                "encoder", name, index=depth, depth=blocks, position=position, sublayers=2
            )
            skips.append(
                create_skip(dim=dim, place=place, batch_dim=0, eps=1e-6, **skip)
            )  # timm's eps
        skips[1].share_with(skips[0])  # for rules with one number a layer
        self.skip1, self.skip2 = skips
        self.norm1 = self.norm2 = nn.Identity()  # the rule has its own

    def forward(self, x, attn_mask=None, is_causal=False):
        h, carried = self.skip1.prepare(x)
        f_x = self.attn(h, attn_mask=attn_mask, is_causal=is_causal)
        x = self.skip1(x, self.drop_path1(self.ls1(f_x)), carried)
        h, carried = self.skip2.prepare(x)
        return self.skip2(x, self.drop_path2(self.ls2(self.mlp(h))), carried)


def vit(blocks: int = 12, skip: dict | None = None, **options) -> VisionTransformer:
    """timm's VisionTransformer; ``skip={"kind": "preln"}`` is timm's own."""
    block = partial(SkipBlock, blocks=blocks, skip=skip or {"kind": "rskip", "skip_lambda": 2})
    return VisionTransformer(depth=blocks, block_fn=block, **options)


if __name__ == "__main__":
    model = vit(4, img_size=32, patch_size=8, embed_dim=64, num_heads=4, num_classes=10)
    print(model(torch.randn(2, 3, 32, 32)).shape)
