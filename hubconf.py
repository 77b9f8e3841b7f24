"""Entry points of torch.hub for folders that ``rskip export`` wrote (docs/share.md).

torch.hub.load(REPOSITORY, "transformer_rskip", DIR, source="local").translate(["A sentence."])
"""

from fairseq_rskip import from_pretrained

dependencies = ["torch", "safetensors"]
transformer_rskip = resnet_rskip = from_pretrained
