"""What building a model does to torch's attention where there is a GPU."""

import torch
from transformer_helpers import build


def test_a_model_on_a_gpu_takes_no_attention_of_cudnn(monkeypatch):
    """It plans its attention again for each shape of a batch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    build("transformer_rskip_ln_tiny")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()
