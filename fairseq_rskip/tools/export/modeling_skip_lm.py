"""A decoder-only Transformer over skip connections, for Hugging Face transformers.

``rskip export CHECKPOINT DIR --transformers`` copies this file beside the weights, and
``AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)`` runs it. It needs torch and
transformers, nothing else, and only names of transformers that have not changed for years:
therefore it has no cache of keys and values, and ``generate`` reads the whole text at every step.

Tensors are ``(batch, seq_len, dim)``. The names of the weights are those of fairseq's decoder.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutput

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


class SkipLMConfig(PretrainedConfig):
    """The settings of a model; those of the skip connection are explained in :class:`Skip`."""

    model_type = "skip_lm"

    def __init__(
        self,
        vocab_size: int = 32,
        hidden_size: int = 64,
        intermediate_size: int = 64,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 2,
        max_position_embeddings: int = 512,
        activation_function: str = "relu",
        skip_kind: str = "rskip",  # the rule's name in fairseq_rskip
        skip_scale: float = 1.0,
        branch_scale: float = 1.0,
        norm_before: bool = False,
        norms_after: int = 2,
        norm: str = "layer",
        norm_eps: float = 1e-5,
        embedding_scale: float = 1.0,
        norm_of_embedding: bool = False,
        final_norm: bool = False,
        share_output: bool = True,  # the output matrix is the embedding
        dropout: float = 0.1,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        use_cache: bool = False,
        tie_word_embeddings: bool = False,  # share_output is without a second tensor to tie
        **options,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.activation_function = activation_function
        self.skip_kind = skip_kind
        self.skip_scale = skip_scale
        self.branch_scale = branch_scale
        self.norm_before = norm_before
        self.norms_after = norms_after
        self.norm = norm
        self.norm_eps = norm_eps
        self.embedding_scale = embedding_scale
        self.norm_of_embedding = norm_of_embedding
        self.final_norm = final_norm
        self.share_output = share_output
        self.dropout = dropout
        self.attention_dropout = attention_dropout
        self.activation_dropout = activation_dropout
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **options)


def make_norm(config: SkipLMConfig) -> nn.Module:
    return NORMS[config.norm](config.hidden_size, eps=config.norm_eps)


class Skip(nn.Module):
    """A skip connection: the sum of the block's input x and its branch F, and the norms around it.

    With ``p = skip_scale`` and ``q = branch_scale``, by the number of ``norms_after``:

    * 0: ``y = p * x + q * F`` (with p = q = 1 the plain skip, xskip with another p);
    * 1: ``y = G(p * x + q * F)`` (post-norm, xskip with a norm);
    * more: ``y_1 = G_1(x + q * F)``, ``y_k = G_k(x + y_{k-1})`` (rskip, the recursive skip).

    With ``norm_before`` the branch sees a norm of x (pre-norm).
    """

    def __init__(self, config: SkipLMConfig):
        super().__init__()
        self.skip_scale = config.skip_scale
        self.branch_scale = config.branch_scale
        self.pre = make_norm(config) if config.norm_before else None
        self.post = nn.ModuleList([make_norm(config) for _ in range(config.norms_after)])

    def before(self, x: Tensor) -> Tensor:
        """What the branch sees."""
        return x if self.pre is None else self.pre(x)

    def forward(self, x: Tensor, f_x: Tensor) -> Tensor:
        y = self.skip_scale * x + self.branch_scale * f_x
        for step, norm in enumerate(self.post):
            y = norm(y) if step == 0 else norm(x + y)
        return y


class SelfAttention(nn.Module):
    """Attention of each position to those that ``allowed`` permits."""

    def __init__(self, config: SkipLMConfig):
        super().__init__()
        dim = config.hidden_size
        self.heads = config.num_attention_heads
        self.dropout = config.attention_dropout
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def split(self, x: Tensor) -> Tensor:
        """``(batch, heads, seq_len, dim / heads)``."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """Self-attention and feed-forward block, each with its skip connection."""

    def __init__(self, config: SkipLMConfig):
        super().__init__()
        self.self_attn = SelfAttention(config)
        self.self_attn_skip = Skip(config)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.final_skip = Skip(config)
        self.activation = ACT2FN[config.activation_function]
        self.dropout = nn.Dropout(config.dropout)
        self.activation_dropout = nn.Dropout(config.activation_dropout)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_dropout(self.activation(self.fc1(x))))

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        f_x = self.self_attn(self.self_attn_skip.before(x), allowed)
        x = self.self_attn_skip(x, self.dropout(f_x))
        f_x = self.feed_forward(self.final_skip.before(x))
        return self.final_skip(x, self.dropout(f_x))


class Decoder(nn.Module):
    """Embeddings, layers and the output matrix: token numbers to logits."""

    def __init__(self, config: SkipLMConfig):
        super().__init__()
        dim = config.hidden_size
        self.embedding_scale = config.embedding_scale
        self.embed_tokens = nn.Embedding(config.vocab_size, dim)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, dim)
        self.layernorm_embedding = None
        if config.norm_of_embedding:
            self.layernorm_embedding = nn.LayerNorm(dim, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList([DecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.layer_norm = make_norm(config) if config.final_norm else None
        self.output_projection = None
        if not config.share_output:
            self.output_projection = nn.Linear(dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
        x = self.embedding_scale * self.embed_tokens(tokens) + self.embed_positions(positions)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, allowed)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        if self.output_projection is None:
            return F.linear(x, self.embed_tokens.weight)
        return self.output_projection(x)


class SkipLMForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model. A text begins with ``config.bos_token_id``."""

    config_class = SkipLMConfig
    base_model_prefix = "decoder"
    # the loss is a mean over a batch: transformers.Trainer divides it by its accumulation steps
    accepts_loss_kwargs = False

    def __init__(self, config: SkipLMConfig):
        super().__init__(config)
        self.decoder = Decoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, embeddings: nn.Embedding) -> None:
        self.decoder.embed_tokens = embeddings

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **ignored
    ) -> dict:
        """The whole text, at every step of ``generate``, also with ``use_cache=True``."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **ignored,
    ):
        """
        Args:
            input_ids: shape ``(batch, seq_len)``
            attention_mask: of the same shape, 0 where padded, at either end
            labels: of the same shape, ``input_ids`` with -100 where the loss has no term

        Returns:
            the mean loss, if there are labels, and logits of shape ``(batch, seq_len, vocab_size)``
        """
        seq_len = input_ids.size(1)
        everywhere = torch.ones(seq_len, seq_len, dtype=torch.bool, device=input_ids.device)
        allowed = everywhere.tril()
        positions = torch.arange(seq_len, device=input_ids.device)[None]
        if attention_mask is not None:
            kept = attention_mask.bool()
            positions = (kept.cumsum(1) - 1).clamp(min=0)
            itself = torch.eye(seq_len, dtype=torch.bool, device=input_ids.device)
            # padding sees itself: a row without any position has no softmax
            allowed = (allowed & kept[:, None, None, :]) | itself
        logits = self.decoder(input_ids, positions, allowed)

        loss = None
        if labels is not None:
            predicted = logits[:, :-1].flatten(0, 1).float()
            loss = F.cross_entropy(predicted, labels[:, 1:].flatten(), ignore_index=-100)
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return CausalLMOutput(loss=loss, logits=logits)
