"""Every skip connection of a model, its constants, what its branch starts with.

The model is built as a training would build it, from seed 1, with a dictionary of a few words and no data.
"""

import argparse
import json
import logging
import re
from argparse import Namespace
from collections.abc import Iterator
from itertools import groupby
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from fairseq_rskip.analysis.coefficients import constants
from fairseq_rskip.console import Parser, in_columns, print_line
from fairseq_rskip.errors import UserError, did_you_mean
from fairseq_rskip.norms import NORMS
from fairseq_rskip.ops import in_use
from fairseq_rskip.residual import Branch, SkipConnection
from fairseq_rskip.residual.profile import wanting_profile
from fairseq_rskip.tools.describe import PROGRAM

GREEK = {"lambda": "λ", "alpha": "α", "beta": "β", "gamma": "γ", "omega": "ω"}
ALIKE = 0.1  # layers whose measured values differ by less, relative to the first, are one row of the table
COLUMNS = "added: parameters of rule and norm; std / Xavier's: of branch matrices, 1 as Xavier draws"
SEED = 1
OF_VOCABULARY = ("embed_tokens.weight", "output_projection.weight")  # whose size is a corpus's


class Row(NamedTuple):
    """One skip connection. ``norms``: by where it stands (before, branch for behind it, after the sum), a norm's name;
    ``std``: by role of a branch matrix, its standard deviation over Xavier's."""

    side: str
    layer: int
    sublayer: str
    rule: str
    constants: dict[str, float]
    norms: dict[str, str]
    rule_parameters: int
    norm_parameters: int
    std: dict[str, float]


def describe(arch: str, options: list[str], as_json: bool) -> None:
    """Print the table, or everything as JSON. Raises ``UserError`` for an unknown architecture or option."""
    if arch.startswith("transformer"):
        arch = _ours(arch)
    torch.manual_seed(SEED)
    resnet = re.fullmatch(r"resnet(\d+)", arch)
    model = _resnet(int(resnet[1]), options) if resnet else _transformer(arch, options)
    rows = describe_skips(model)
    added = sum(each.rule_parameters + each.norm_parameters for each in rows)
    total = sum(p.numel() for name, p in model.named_parameters() if not name.endswith(OF_VOCABULARY))
    backend = in_use()
    computed = f"{backend.name} ({backend.reason})"
    if as_json:
        facts = {"arch": arch, "parameters": total, "embeddings_counted": False, "added": added, "ops": computed}
        print_line(json.dumps({**facts, "skips": [r._asdict() for r in rows]}, indent=1))
        return
    left_out = "" if resnet else ", embeddings and output projection not counted"
    print_line(f"{arch}: {len(rows)} skip connections with {added:,} of {total:,} parameters{left_out}")
    print_line(f"recursive skip computed by {computed}")
    for line in [*table(rows), COLUMNS]:
        print_line(line)
    if wanting_profile(model):
        print_line("ω, or λ from the gradient, is set from the first batch of a training")


def _ours(arch: str) -> str:
    """``arch``, or our architecture that equals it where it is one of stock fairseq's."""
    from fairseq_rskip.models._presets import LM_SIZES, SIZES

    lm, size = "transformer_lm", arch.removeprefix("transformer_lm")
    if arch == lm or arch.removeprefix("transformer") in SIZES:
        ours = f"{lm}_postln" if arch == lm else arch.replace("transformer", "transformer_postln", 1)
        same = "post-norm, xskip with λ = 1"
    elif arch.startswith(lm) and size in LM_SIZES:
        ours, same = f"{lm}_preln{size}", "pre-norm"
    else:
        return arch
    print_line(f"{arch} is stock fairseq's; the same model here is {ours} ({same})", "stderr")
    return ours


def _transformer(arch: str, options: list[str]) -> nn.Module:
    from fairseq import models
    from fairseq.data import Dictionary

    from fairseq_rskip.models import skip_architectures

    known = skip_architectures()
    if arch not in known:
        hint = f"{did_you_mean(arch, known)} expected resnet20, resnet110 or another 6n+2, or one of ours"
        raise UserError(f"no architecture named {arch!r}; {hint} that rskip train --archs lists")
    parser = Parser(prog=PROGRAM, argument_default=argparse.SUPPRESS)
    models.ARCH_MODEL_REGISTRY[arch].add_args(parser)
    given = vars(parser.parse_args(options))
    words = Dictionary()
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    given = {"max_target_positions": 1024, **given}  # of a language model, the task's
    logging.getLogger("fairseq_rskip").setLevel(logging.WARNING)
    try:
        return models.build_model(Namespace(arch=arch, **given), task)
    except UserError:
        raise
    except (AssertionError, ValueError) as error:
        raise UserError(f"{arch} {' '.join(options)}: {error}") from None


def _resnet(depth: int, options: list[str]) -> nn.Module:
    from fairseq_rskip.vision.config import parse
    from fairseq_rskip.vision.model import preact_resnet

    config = parse(["--depth", str(depth), *options])
    if config.depth != depth:
        raise UserError(f"resnet{depth} with --depth {config.depth}: expected resnet{config.depth} alone")
    return preact_resnet(num_classes=10, **config.network())


def describe_skips(model: nn.Module) -> list[Row]:
    """What there is to say about each skip connection."""
    counted: set[nn.Parameter] = set()  # each once, with the first that it belongs to, whoever shares it
    return [row(skip, branch, counted) for skip, branch in skips(model)]


def skips(model: nn.Module) -> Iterator[tuple[SkipConnection, Branch]]:
    """Each skip connection of a Transformer or ResNet, in the order of the model, with the weights of its branch."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, SkipConnection):
                of_resnet = child.place.side == "resnet"
                yield child, module.branch() if of_resnet else module.branch(child.place.sublayer)


def row(skip: SkipConnection, branch: Branch, counted: set[nn.Parameter]) -> Row:
    """What there is to say about one skip connection; its parameters join those ``counted`` before, which it has not
    added."""
    new = [parameter for parameter in skip.parameters() if parameter not in counted]
    counted.update(new)
    own = sum(parameter.numel() for parameter in new if any(parameter is p for p in skip.learned().values()))
    std = {role: float(w.tensor.detach().double().std(unbiased=False)) / w.xavier for role, w in branch.items()}
    norms = {"before": skip.pre, "branch": skip.branch, "after": next(iter(skip.post), None)}
    norms = {where: _name(norm) for where, norm in norms.items() if norm is not None}
    dropped = {"drop": skip.drop_rate} if skip.drop_rate else {}
    return Row(
        *(skip.place.side, skip.place.index, skip.place.sublayer, skip.kind, {**constants(skip), **dropped}),
        {where: name for where, name in norms.items() if name != "none"},
        own,
        sum(parameter.numel() for parameter in new) - own,
        {role: round(value, 4) for role, value in std.items()},
    )


def table(rows: list[Row]) -> list[str]:
    """Lines of text, layers that are alike put together."""
    cells = [("place", "rule", "norm", "added", "std / Xavier's")]
    for first, last, layer in _groups(rows):
        for r in layer:
            number = f"{first}" if first == last else f"{first}-{last}"
            constants = " ".join(f"{GREEK.get(name, name)}={value:.4g}" for name, value in r.constants.items())
            norm = " ".join(f"{where} {name}" for where, name in r.norms.items())
            place, added = f"{r.side} {number} {r.sublayer}", str(r.rule_parameters + r.norm_parameters)
            cells.append((place, f"{r.rule} {constants}".rstrip(), norm, added, _deviations(r.std)))
    return in_columns(cells)


def _name(norm: nn.Module) -> str:
    return {cls: name for name, cls in NORMS.items()}.get(type(norm), type(norm).__name__)


def _deviations(std: dict[str, float]) -> str:
    """``q,k,v 0.71 out 1.00``: neighbours that read alike are put together."""
    runs = groupby(std, key=lambda role: f"{std[role]:.2f}")
    return " ".join(f"{','.join(roles)} {value}" for value, roles in runs)


def _groups(rows: list[Row]) -> list[list[Any]]:
    """First layer, last layer and the rows of the first, for consecutive layers that are alike."""
    layers: dict[tuple[str, int], list[Row]] = {}
    for r in rows:
        layers.setdefault((r.side, r.layer), []).append(r)
    groups: list[list[Any]] = []
    for layer in layers.values():
        if groups and _alike(groups[-1][2], layer):
            groups[-1][1] = layer[0].layer
        else:
            groups.append([layer[0].layer, layer[0].layer, layer])
    return groups


def _alike(one: list[Row], other: list[Row]) -> bool:
    def same(a: Row, b: Row) -> bool:
        close = all(abs(b.std[role] - value) <= ALIKE * abs(value) for role, value in a.std.items() if role in b.std)
        return a._replace(layer=0, std={}) == b._replace(layer=0, std={}) and a.std.keys() == b.std.keys() and close

    return len(one) == len(other) and all(map(same, one, other))
