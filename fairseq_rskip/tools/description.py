"""Every skip connection of a model, its constants, the scale of its branch's weights.

An architecture is built as a training would build it, from seed 1, with a dictionary of a few words
and no data. A checkpoint is described with its own weights.
"""

import argparse
import logging
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn

from fairseq_rskip.console import Parser, in_columns, print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.norms import NORMS
from fairseq_rskip.norms.rows import DyT
from fairseq_rskip.ops import in_use
from fairseq_rskip.pretrained import bundled_names
from fairseq_rskip.residual import BranchWeights, SkipConnection, own_rules, skips
from fairseq_rskip.residual.docstrings import equation, paper
from fairseq_rskip.residual.profile import wanting_profile

GREEK = {"lambda": "λ", "alpha": "α", "beta": "β", "gamma": "γ", "omega": "ω"}
ALIKE = 0.1  # measured values of blocks that differ by less are shown as one
COLUMNS = (
    "added: parameters of rule and norm; std / Xavier's: of branch matrices, 1 as Xavier draws"
)
SEED = 1
# of modules whose size is a corpus's
OF_VOCABULARY = ("embed_tokens.", "output_projection.", "adaptive_softmax.")


class SkipRow(NamedTuple):
    """One skip connection.

    ``choices``: the rule's other options; ``norms``: the name of each norm, and its α
    where it has one, by its position (before, branch, after the sum); ``std``: the standard
    deviation of each branch matrix over Xavier's, by the matrix's role.
    """

    side: str
    layer: int
    sublayer: str
    rule: str
    choices: dict[str, str]
    constants: dict[str, float]
    norms: dict[str, str]
    rule_parameters: int
    norm_parameters: int
    std: dict[str, float]


def describe(name: str, options: list[str]) -> None:
    """Print the table of an architecture with ``options``, or of a trained model.

    Raises ``UserError``.
    """
    model = build(name, options)
    rows = describe_skips(model)
    if not rows:
        raise UserError(f"{name} has no skip connections of ours")
    added = sum(each.rule_parameters + each.norm_parameters for each in rows)
    total = 0
    for parameter_name, parameter in model.named_parameters():
        if not any(module in parameter_name for module in OF_VOCABULARY):
            total += parameter.numel()
    left_out = "" if rows[0].side == "resnet" else ", embeddings and output projection not counted"
    print_line(
        f"{name}: {len(rows)} skip connections with {added:,} of {total:,} parameters{left_out}"
    )
    if any(each.post for each in skips(model).values()):
        backend = in_use()
        computed_by = "torch" if backend.name == "torch" else "our compiled operator"
        print_line(f"sums and the norms after them computed by {computed_by} ({backend.reason})")
    print_line("\n".join([*table(rows), COLUMNS]))
    for kind in dict.fromkeys(row.rule for row in rows):
        if formula := equation(kind):
            number = paper(kind)
            where = own_rules.file_of(kind) or "docs/rules.md"
            source = f"arXiv {number}; {where}" if number else where
            print_line(f"{kind}: {formula} ({source})")
    if any(word in ("auto", "--skip-lambda=auto") for word in options):
        print_line("λ is auto's estimate from the number of residuals (docs/depth.md)")
    if wanting_profile(model):
        print_line("ω, or λ from the gradient, is set from the first batch of a training")


def build(name: str, options: list[str]) -> nn.Module:
    """The model, as a training would build it or as a checkpoint has it. Raises ``UserError``."""
    torch.manual_seed(SEED)
    if resnet := re.fullmatch(r"resnet(\d+)", name):
        return _resnet(int(resnet[1]), options)
    path = Path(name)
    is_model = path.suffix == ".pt" or "/" in name or path.is_dir() or name in bundled_names()
    if not is_model:
        return _transformer(name, options)
    if options:
        raise UserError(
            f"{name} is a trained model: expected no options, found {' '.join(options)}"
        )
    from fairseq_rskip.tools.saved_model import load_model

    return load_model(path)


def _transformer(arch: str, options: list[str]) -> nn.Module:
    from fairseq import models
    from fairseq.data import Dictionary

    from fairseq_rskip.models import nearest_architecture, skip_architectures

    if arch not in skip_architectures():
        expected = "expected resnet20, resnet110 or another 6n+2, "
        expected += "one of ours that rskip train --archs lists, or a checkpoint"
        hint = nearest_architecture(arch, expected)
        raise UserError(f"no architecture named {arch!r}; {hint}{own_rules.hint()}")
    parser = Parser(prog=f"rskip describe {arch}", argument_default=argparse.SUPPRESS)
    words = Dictionary()
    for word in "abcd":
        words.add_symbol(word)
    models.ARCH_MODEL_REGISTRY[arch].add_args(parser)
    # max_target_positions: of a language model, the task's
    arguments = {"arch": arch, "max_target_positions": 1024, **vars(parser.parse_args(options))}
    config = models.MODEL_DATACLASS_REGISTRY[arch]()
    for cutoff in ("adaptive_input_cutoff", "adaptive_softmax_cutoff"):
        if arguments.get(cutoff, getattr(config, cutoff, None)):
            arguments[cutoff] = "4,6"  # of a corpus's words: here there are eight
    logger = logging.getLogger("fairseq_rskip")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        return models.build_model(
            Namespace(**arguments),
            SimpleNamespace(source_dictionary=words, target_dictionary=words),
        )
    except UserError:
        raise
    except (AssertionError, ValueError) as error:
        raise UserError(f"{arch} {' '.join(options)}: {error}") from None
    finally:
        logger.setLevel(level)


def _resnet(depth: int, options: list[str]) -> nn.Module:
    from fairseq_rskip.vision.config import parse
    from fairseq_rskip.vision.model import PreActResNet

    config = parse(["--depth", str(depth), *options])
    if config.depth != depth:
        raise UserError(
            f"resnet{depth} with --depth {config.depth}: expected resnet{config.depth} alone"
        )
    return PreActResNet(num_classes=10, **config.network())


def describe_skips(model: nn.Module) -> list[SkipRow]:
    """A row for each skip connection. A shared parameter counts with the first that has it."""
    counted: set[nn.Parameter] = set()
    rows = []
    for skip, branch in skips_with_branches(model):
        new = [parameter for parameter in skip.parameters() if parameter not in counted]
        counted.update(new)
        own = _size_of_rule(skip, new)
        constants = dict(skip.constants())
        if skip.drop_rate:
            constants["drop"] = skip.drop_rate
        rows.append(
            SkipRow(
                side=skip.place.side,
                layer=skip.place.index,
                sublayer=skip.place.sublayer,
                rule=skip.kind,
                choices=skip.choices(),
                constants=constants,
                norms=_norms(skip),
                rule_parameters=own,
                norm_parameters=sum(parameter.numel() for parameter in new) - own,
                std=_deviations(branch),
            )
        )
    return rows


def _size_of_rule(skip: SkipConnection, parameters: list[nn.Parameter]) -> int:
    """The number of values in those ``parameters`` that the rule learns; the others are norms'."""
    learned = {id(parameter) for parameter in skip.learned().values()}
    return sum(parameter.numel() for parameter in parameters if id(parameter) in learned)


def _norms(skip: SkipConnection) -> dict[str, str]:
    """The name of each norm by its position, with its α where it has one."""
    names = {cls: name for name, cls in NORMS.items()}
    norms = {"before": skip.pre, "branch": skip.branch, "after": next(iter(skip.post), None)}
    texts = {}
    for position, norm in norms.items():
        name = names.get(type(norm), type(norm).__name__)
        if norm is not None and name != "none":
            alpha = f" α={float(norm.alpha.detach()):.4g}" if isinstance(norm, DyT) else ""
            texts[position] = name + alpha
    return texts


def _deviations(weights: BranchWeights) -> dict[str, float]:
    """The standard deviation of each matrix of a branch over Xavier's."""
    deviations = {}
    for role, weight in weights.items():
        deviation = float(weight.tensor.detach().double().std(unbiased=False))
        deviations[role] = round(deviation / weight.xavier, 4)
    return deviations


def skips_with_branches(model: nn.Module) -> Iterator[tuple[SkipConnection, BranchWeights]]:
    """Each skip connection of a Transformer or ResNet, in the model's order, with its branch."""
    for module in model.modules():
        for child in module.children():
            if not isinstance(child, SkipConnection):
                continue
            if child.place.side == "resnet":  # a block has one branch
                yield child, module.branch_weights()
            else:
                yield child, module.branch_weights(child.place.sublayer)


def table(rows: list[SkipRow]) -> list[str]:
    """Lines of text; blocks of the same rule, constants, norms and parameters are one."""
    groups: dict[str, list[SkipRow]] = {}
    for row in rows:
        same = repr(row._replace(layer=0, std={}))
        groups.setdefault(same, []).append(row)

    cells = [("place", "rule", "norm", "added", "std / Xavier's")]
    for alike in groups.values():
        row = alike[0]
        rule = [row.rule, *(f"{name}={value}" for name, value in row.choices.items())]
        for name, value in row.constants.items():
            rule.append(f"{GREEK.get(name, name)}={value:.4g}")
        cells.append(
            (
                f"{row.side} {_layers(alike)} {row.sublayer}",
                " ".join(rule),
                " ".join(f"{where} {name}" for where, name in row.norms.items()),
                str(row.rule_parameters + row.norm_parameters),
                _spans(alike),
            )
        )
    return in_columns(cells)


def _layers(rows: list[SkipRow]) -> str:
    """The numbers of the layers: 0-5, or 0,2,4."""
    layers = [row.layer for row in rows]
    if len(layers) > 1 and layers == [*range(layers[0], layers[-1] + 1)]:
        return f"{layers[0]}-{layers[-1]}"
    return ",".join(map(str, layers))


def _spans(rows: list[SkipRow]) -> str:
    """The deviations of each matrix over the rows; matrices with the same ones are together."""
    roles_of: dict[str, list[str]] = {}
    for role in rows[0].std:
        span = _span([row.std[role] for row in rows])
        roles_of.setdefault(span, []).append(role)
    return " ".join(f"{','.join(roles)} {span}" for span, roles in roles_of.items())


def _span(values: list[float]) -> str:
    low, high = min(values), max(values)
    if high - low <= ALIKE * high:
        return f"{sum(values) / len(values):.2f}"
    return f"{low:.2f}-{high:.2f}"
