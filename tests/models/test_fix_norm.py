"""FixNorm: embeddings of unit length wherever they are used, drawn and stored as fairseq's."""

import pytest
import torch
from transformer_helpers import TINY, batch, build, dictionary, sentences

from fairseq_rskip.errors import UserError

SHARING = {
    "separate": {},
    "output": {"share_decoder_input_output_embed": True},
    "all": {"share_all_embeddings": True},
}


@pytest.fixture(params=SHARING)
def model(request):
    return build("transformer_scalenorm_tiny", **TINY, **SHARING[request.param]).double()


def test_every_word_enters_with_one_length_and_leaves_as_a_scaled_cosine(model):
    src, lengths, prev = batch(sentences((6, 6, 6)))
    embedded = model.encoder.forward_embedding(src)[1]
    torch.testing.assert_close(
        embedded.norm(dim=-1), torch.full(src.shape, 32**0.5, dtype=torch.float64)
    )
    features = model.extract_features(src, lengths, prev)[0]
    logits, vocabulary = (
        model(src, lengths, prev)[0],
        model.decoder.output_projection.weight[dictionary().nspecial :],
    )
    cosine = torch.cosine_similarity(features.unsqueeze(-2), vocabulary, dim=-1)
    g = model.decoder.layer_norm.weight  # the length that ScaleNorm gives what leaves the stack
    torch.testing.assert_close(logits[..., dictionary().nspecial :], g * cosine)


def test_the_length_of_a_stored_embedding_means_nothing(model):
    inputs = batch(sentences())
    before = model(*inputs)[0]
    with torch.no_grad():
        for weight in {model.encoder.embed_tokens.weight, model.decoder.embed_tokens.weight}:
            weight *= 7
    torch.testing.assert_close(model(*inputs)[0], before)
    model(*inputs)[0].logsumexp(-1).sum().backward()
    weight = model.decoder.output_projection.weight
    assert torch.isfinite(weight.grad).all() and weight.grad.abs().max() > 0
    along = (weight.grad * weight).sum(-1)
    torch.testing.assert_close(along, torch.zeros_like(along), rtol=0, atol=1e-9)


def test_padding_stays_zero(model):
    embedding, pad = model.encoder.embed_tokens, dictionary().pad()
    actual = embedding(torch.tensor([pad, 5]))
    (actual * torch.arange(32.0)).sum().backward()
    assert actual[0].eq(0).all() and embedding.weight.grad[pad].eq(0).all()
    assert embedding.weight.grad[5].abs().max() > 0


@pytest.mark.parametrize("saved", ["scalenorm", "preln"])
def test_a_checkpoint_of_the_other_setting_is_refused(saved):
    models = {
        arch: build(f"transformer_{arch}_tiny", **TINY, skip_norm="scale")
        for arch in ("scalenorm", "preln")
    }
    state = models.pop(saved).state_dict()
    (other,) = models.values()
    with pytest.raises(
        UserError, match=f"^the model was saved with fix_norm={saved == 'scalenorm'}: expected "
    ):
        other.load_state_dict(state)
    del state._metadata[""]["skip"]  # of another program, which noted nothing
    other.load_state_dict(state)


def test_several_matrices_of_embeddings_are_refused():
    with pytest.raises(UserError, match="with --fix-norm: expected neither --adaptive-input nor"):
        build("transformer_scalenorm_tiny", **TINY, adaptive_softmax_cutoff="10,20")
    adaptive = {"adaptive_input": True, "adaptive_input_cutoff": "10,20"}
    with pytest.raises(UserError, match="with --fix-norm: expected neither --adaptive-input nor"):
        build("transformer_lm_scalenorm_tiny", tokens_per_sample=64, **adaptive)


def test_quantisation_noise_of_unit_embeddings_is_refused():
    with pytest.raises(UserError, match="with --fix-norm: expected no --quant-noise-scalar"):
        build("transformer_scalenorm_tiny", **TINY, quant_noise_scalar=0.1)


def test_a_rule_that_scales_the_embeddings_is_refused():
    with pytest.raises(UserError, match="with --fix-norm: expected no --skip-kind tfixup, which"):
        build("transformer_tfixup_tiny", **TINY, fix_norm=True)
