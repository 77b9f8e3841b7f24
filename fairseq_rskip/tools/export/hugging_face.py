"""A language model as a folder that Hugging Face transformers loads.

Pre-norm is GPT-2's own network, and becomes its class. Other rules come with their code,
``modeling_skip_lm.py``.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json
from fairseq_rskip.pretrained import CONFIG, WEIGHTS
from fairseq_rskip.residual import skips

from . import tokenising
from .card import Card

CODE = "modeling_skip_lm"
MODEL_TYPE, CONFIG_CLASS, MODEL_CLASS = "skip_lm", "SkipLMConfig", "SkipLMForCausalLM"  # of CODE
SYMBOLS = "symbols.json"
# The rules y_1 = G_1(p * x + q * F), y_k = G_k(x + y_{k-1}) whose p and q are the same numbers in
# every layer; some of them also scale what the weights start with.
CONVERTED_KINDS = (
    "xskip",
    "rskip",
    "preln",
    "gpt2",
    "deepnorm",
    "scaled",
    "residual_scaling",
    "completep",
)
NORMS: dict[type[nn.Module], str] = {nn.LayerNorm: "layer", nn.RMSNorm: "rms"}
# fairseq's activation functions by the names of transformers
ACTIVATIONS = {
    "relu": "relu",
    "relu_squared": "relu2",
    "gelu": "gelu",
    "gelu_accurate": "gelu_new",
    "gelu_fast": "gelu_new",
    "tanh": "tanh",
    "linear": "linear",
}
EXAMPLE = """import json
import torch
from transformers import AutoModelForCausalLM
{imports}
model = AutoModelForCausalLM.from_pretrained("DIR"{trust}).eval()  # this folder

text = "A text"
{split}
symbols = json.load(open("DIR/{symbols}", encoding="utf-8"))
numbers = {{symbol: number for number, symbol in enumerate(symbols)}}
tokens = torch.tensor([[{bos}] + [numbers.get(piece, {unk}) for piece in pieces]])

tokens = model.generate(tokens, max_length={length}, do_sample=False)[0]
pieces = [symbols[token] for token in tokens[1:] if token != {eos}]
print({joined})"""
TOKENS_NOTE = (
    "AutoTokenizer has no class for these tokens; the lines above make them. "
    "A text begins with the symbol for a line's end."
)
GPT2_NOTE = f"Pre-norm is GPT-2's network and is loaded as transformers' own class. {TOKENS_NOTE}"
OWN_NOTE = (
    f"`trust_remote_code=True` runs {CODE}.py of this folder, which has the equation. It keeps no "
    f"cache: `generate` reads the whole text again for every token. {TOKENS_NOTE}"
)


class Rule(NamedTuple):
    """The skip connections of a stack, in the terms of ``modeling_skip_lm.Skip``."""

    skip_kind: str
    skip_scale: float
    branch_scale: float
    norm_before: bool
    norms_after: int
    norm: str
    norm_eps: float


def write_export(folder: Path, config: dict[str, Any], model: Any, card: Card) -> Card:
    """Write the model into ``folder``, which has dictionary and subwords; returns its card.

    ``config`` and ``card`` are those of an export in the project's own format. Raises ``UserError``
    as :func:`write_model` does.
    """
    settings = write_model(folder, model)
    (folder / "dict.txt").unlink()  # symbols.json has it, with the special symbols

    is_own = "auto_map" in settings
    dictionary = model.decoder.dictionary
    example = EXAMPLE.format(
        imports=tokenising.imports(config),
        trust=", trust_remote_code=True" if is_own else "",
        split=tokenising.split(config),
        symbols=SYMBOLS,
        bos=settings["bos_token_id"],
        unk=dictionary.unk(),
        length=min(100, model.decoder.max_positions()),
        eos=dictionary.eos(),
        joined=tokenising.joined(config),
    )
    header = {**card.header, "library_name": "transformers"}
    note = OWN_NOTE if is_own else GPT2_NOTE
    return replace(card, header=header, example=example, loading="", note=note)


def write_model(folder: Path, model: Any) -> dict[str, Any]:
    """Write what transformers reads into ``folder``: settings, weights, the code where it is
    needed, and symbols.json, the symbols in the order of their numbers.

    Returns config.json. Raises ``UserError`` for a model that neither GPT-2's class nor
    ``modeling_skip_lm.py`` expresses.
    """
    from safetensors.torch import save_file

    settings, weights = convert(model)
    special = {name: settings[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / CONFIG, settings)
    # fairseq never generates padding
    generation = {**special, "suppress_tokens": [special["pad_token_id"]]}
    if "auto_map" in settings:
        generation["use_cache"] = False
    write_json(folder / "generation_config.json", generation)
    # without it, AutoTokenizer makes an empty tokenizer of GPT-2; with it, it refuses
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    write_json(folder / SYMBOLS, model.decoder.dictionary.symbols)
    save_file(weights, str(folder / WEIGHTS), metadata={"format": "pt"})
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # others may read it, too
    if "auto_map" in settings:
        shutil.copyfile(Path(__file__).with_name(f"{CODE}.py"), folder / f"{CODE}.py")
    return settings


def convert(model: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the weights. Raises ``UserError`` for a model that cannot be expressed."""
    decoder = model.eval().decoder  # in training, LayerDrop leaves layers out
    check(decoder)
    rule = rule_of(decoder)
    dictionary = decoder.dictionary
    weight = decoder.embed_tokens.weight
    settings = {
        "vocab_size": len(dictionary),
        "bos_token_id": dictionary.bos() if decoder.cfg.add_bos_token else dictionary.eos(),
        "eos_token_id": dictionary.eos(),
        "pad_token_id": dictionary.pad(),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "activation_function": ACTIVATIONS[str(decoder.cfg.activation_fn)],
    }
    if is_gpt2(decoder, rule):
        return {**settings, **gpt2_settings(decoder, rule)}, gpt2_weights(decoder)
    return {**settings, **own_settings(decoder, rule)}, own_weights(decoder)


def check(decoder: Any) -> None:
    """Raise ``UserError`` for what neither class has."""
    feature = ""
    if decoder.adaptive_softmax is not None:
        feature = "an adaptive softmax"
    elif type(decoder.embed_tokens) is not nn.Embedding:
        feature = "adaptive inputs or embeddings of unit length"
    elif decoder.project_in_dim is not None or decoder.project_out_dim is not None:
        feature = "embeddings of another width than its layers"
    elif decoder.quant_noise is not None or decoder.cfg.quant_noise.scalar > 0:
        feature = "quantisation noise"
    elif decoder.cfg.decoder.xformers_att_config:
        feature = "attention of xFormers"
    if feature:
        raise UserError(
            f"--transformers: this model has {feature}: "
            "expected one embedding matrix, one output matrix and fairseq's attention"
        )


def rule_of(decoder: Any) -> Rule:
    """The rule of all skip connections.

    Raises ``UserError`` unless it is one of ``CONVERTED_KINDS`` with layer or RMS norm.
    """
    rules = {describe(skip) for skip in skips(decoder).values()}
    final = decoder.layer_norm
    rule = next(iter(rules))
    if len(rules) > 1 or (final is not None and norm_of([final]) != (rule.norm, rule.norm_eps)):
        raise UserError(
            f"--transformers: the skip connections of this model differ ({rule.skip_kind}): "
            "expected one rule, with the same numbers and norms in every layer"
        )
    return rule


def describe(skip: Any) -> Rule:
    """A skip connection as a rule. Raises ``UserError``."""
    norms = [*skip.post]
    if skip.pre is not None:
        norms.append(skip.pre)
    norm, eps = norm_of(norms)
    if skip.kind not in CONVERTED_KINDS or norm not in NORMS.values():
        raise UserError(
            f"--transformers cannot express the rule {skip.kind} with {skip.options.norm} norm: "
            f"expected {', '.join(CONVERTED_KINDS)}, without norm or with layer or rms norm"
        )
    return Rule(
        skip_kind=skip.kind,
        skip_scale=skip.skip_scale,
        branch_scale=skip.branch_scale,
        norm_before=skip.pre is not None,
        norms_after=len(skip.post),
        norm=norm,
        norm_eps=eps,
    )


def norm_of(norms: list[Any]) -> tuple[str, float]:
    """The name and eps of norms of one type; ("", 0) for another type than layer and RMS norm."""
    if not norms:
        return "layer", 1e-5
    for module, name in NORMS.items():
        if all(isinstance(norm, module) for norm in norms):
            return name, norms[0].eps
    return "", 0.0


def is_gpt2(decoder: Any, rule: Rule) -> bool:
    """Whether the model is GPT-2's: x + F(LN(x)), and a norm behind the last layer."""
    is_pre_norm = rule.norm_before and rule.norms_after == 0 and rule.norm == "layer"
    is_plain_sum = rule.skip_scale == 1.0 and rule.branch_scale == 1.0
    has_its_norms = decoder.layer_norm is not None and decoder.layernorm_embedding is None
    return is_pre_norm and is_plain_sum and has_its_norms


def positions(decoder: Any) -> Tensor:
    """The vector that is added at each position, learned or of sines: ``(max_positions, dim)``."""
    count = decoder.max_positions()
    if decoder.embed_positions is None:
        return decoder.embed_tokens.weight.new_zeros(count, decoder.embed_dim)
    no_padding = torch.full((1, count), decoder.padding_idx + 1)
    return decoder.embed_positions(no_padding)[0]


def gpt2_settings(decoder: Any, rule: Rule) -> dict[str, Any]:
    """What transformers' ``GPT2Config`` reads."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": decoder.max_positions(),
        "n_embd": decoder.embed_dim,
        "n_inner": decoder.layers[0].fc1.out_features,
        "n_layer": len(decoder.layers),
        "n_head": decoder.layers[0].self_attn.num_heads,
        "layer_norm_epsilon": rule.norm_eps,
        "embd_pdrop": decoder.cfg.dropout,
        "resid_pdrop": decoder.cfg.dropout,
        "attn_pdrop": decoder.cfg.attention_dropout,
        "tie_word_embeddings": False,  # the scale of the embedding is in wte
    }


def gpt2_weights(decoder: Any) -> dict[str, Tensor]:
    """The weights by the names and in the layout of ``GPT2LMHeadModel``, whose matrices are
    ``(in, out)``.
    """
    weights = {
        "transformer.wte.weight": decoder.embed_scale * decoder.embed_tokens.weight,
        "transformer.wpe.weight": positions(decoder),
        "lm_head.weight": decoder.output_projection.weight,
    }
    modules = {"transformer.ln_f": decoder.layer_norm}
    for number, layer in enumerate(decoder.layers):
        name = f"transformer.h.{number}"
        attention = layer.self_attn
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        together = torch.cat([projection.weight for projection in projections])
        weights[f"{name}.attn.c_attn.weight"] = together.t()
        weights[f"{name}.attn.c_attn.bias"] = torch.cat([each.bias for each in projections])
        linears = {
            "attn.c_proj": attention.out_proj,
            "mlp.c_fc": layer.fc1,
            "mlp.c_proj": layer.fc2,
        }
        for stem, linear in linears.items():
            weights[f"{name}.{stem}.weight"] = linear.weight.t()
            weights[f"{name}.{stem}.bias"] = linear.bias
        modules[f"{name}.ln_1"] = layer.self_attn_skip.pre
        modules[f"{name}.ln_2"] = layer.final_skip.pre
    for name, norm in modules.items():
        weights[f"{name}.weight"] = norm.weight
        weights[f"{name}.bias"] = norm.bias
    return stored(weights)


def own_settings(decoder: Any, rule: Rule) -> dict[str, Any]:
    """What ``SkipLMConfig`` reads."""
    return {
        "architectures": [MODEL_CLASS],
        "model_type": MODEL_TYPE,
        "auto_map": {
            "AutoConfig": f"{CODE}.{CONFIG_CLASS}",
            "AutoModelForCausalLM": f"{CODE}.{MODEL_CLASS}",
        },
        "hidden_size": decoder.embed_dim,
        "intermediate_size": decoder.layers[0].fc1.out_features,
        "num_hidden_layers": len(decoder.layers),
        "num_attention_heads": decoder.layers[0].self_attn.num_heads,
        "max_position_embeddings": decoder.max_positions(),
        **rule._asdict(),
        "embedding_scale": decoder.embed_scale,
        "norm_of_embedding": decoder.layernorm_embedding is not None,
        "final_norm": decoder.layer_norm is not None,
        "share_output": decoder.share_input_output_embed,
        "dropout": decoder.cfg.dropout,
        "attention_dropout": decoder.cfg.attention_dropout,
        "activation_dropout": decoder.cfg.activation_dropout,
        "use_cache": False,
    }


def own_weights(decoder: Any) -> dict[str, Tensor]:
    """The weights by the names of ``SkipLMForCausalLM``, which are fairseq's."""
    weights = {}
    for name, value in decoder.named_parameters(prefix="decoder"):
        weights[name] = value
    weights["decoder.embed_positions.weight"] = positions(decoder)
    return stored(weights)


def stored(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors, as safetensors takes them: none shared, all contiguous."""
    return {name: value.detach().clone().contiguous() for name, value in weights.items()}
