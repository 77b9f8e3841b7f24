#!/usr/bin/env python
"""Fill in the generated columns of each rule in docs/rules.md.

    python scripts/rules_table.py          # rewrites docs/rules.md
    python scripts/rules_table.py --check  # names the rows that are out of date, exit status 1

Name: the first words of the docstring of the rule's class, the paper's number there, and what the
rule is called elsewhere.
Parameters: those of the model of width 512 with 6+6 layers, less pre-norm's (``preln``). At the
start: whether the logits of a model of width 32 with 6+6 layers are those of pre-norm or post-norm
from the same seed: ``=`` bit for bit, ``≈`` up to 0.3 % of their standard deviation, which is what
eps in the norms of a smaller stream leaves. Step, memory: results/rule_cost.csv, which
``python -m benchmarks.rules`` measures.
"""

import csv
import functools
import inspect
import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import torch
from fairseq import models
from fairseq.data import Dictionary
from torch import Tensor, nn

import fairseq_rskip.models  # noqa: F401  (registers the architectures)
from fairseq_rskip.console import Parser
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import write_text
from fairseq_rskip.models.architectures import first_variant
from fairseq_rskip.residual import KINDS, skips
from fairseq_rskip.residual.docstrings import paper
from fairseq_rskip.residual.names import OTHER_NAMES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "rules.md"
COSTS = PAGE.parents[1] / "results" / "rule_cost.csv"
COLUMNS = ("name", "parameters", "at the start", "step, memory")
BASELINES = {"pre-norm": "preln", "post-norm": "postln"}
NEARLY = 3e-3
SMALL = {"encoder_layers": 6, "decoder_layers": 6, "encoder_embed_dim": 32}


def build(variant: str, **options: int) -> nn.Module:
    """The translation model ``transformer_<variant>``, from seed 1, with 44 words."""
    words = Dictionary()
    for k in range(40):
        words.add_symbol(f"w{k}")
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    torch.manual_seed(1)
    args = Namespace(arch=f"transformer_{variant}", encoder_ffn_embed_dim=64, **options)
    return models.build_model(args, task).eval()


@functools.cache
def number_of_parameters(variant: str) -> int:
    """Of the model of width 512 with 6+6 layers; its feed-forward width is the same for all."""
    with torch.device("meta"):
        model = build(variant)
    return sum(parameter.numel() for parameter in model.parameters())


@functools.cache
def logits(variant: str) -> Tensor:
    """Of the small model at its start, for three random sentences."""
    model = build(variant, encoder_attention_heads=2, decoder_attention_heads=2, **SMALL)
    if any(getattr(skip, "wants_profile", False) for skip in skips(model).values()):
        return torch.full((1,), float("nan"))  # it starts only when it has seen a batch
    generator = torch.Generator().manual_seed(3)
    source, target = (torch.randint(4, 44, (3, n), generator=generator) for n in (7, 9))
    with torch.no_grad():
        return model(source, torch.full((3,), 7), target)[0]


def parameters_cell(variant: str) -> str:
    added = number_of_parameters(variant) - number_of_parameters("preln")
    return f"{added:+,}".replace("-", "−") if added else "0"


def start_cell(variant: str) -> str:
    for name, plain in BASELINES.items():
        if torch.equal(logits(variant), logits(plain)):
            return f"= {name}"
    for name, plain in BASELINES.items():
        difference = (logits(variant) - logits(plain)).abs().max()
        if difference <= NEARLY * logits(plain).std():
            return f"≈ {name}"
    return ""


@functools.cache
def costs() -> dict[str, str]:
    """Variant -> its training step and the memory it keeps for backward, over pre-norm's."""
    with COSTS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {row["rule"]: f"{float(row['step']):.2f}, {float(row['kept']):.2f}" for row in rows}


def cost_cell(variant: str) -> str:
    return "1, 1" if variant == BASELINES["pre-norm"] else costs().get(variant, "")


def name_cell(kind: str, variants: list[str]) -> str:
    """``Hyper-connections, [2409.19606](…)``: the docstring's name and its first arXiv number; in
    the rule's first row also what it is called elsewhere, where that is another name.
    """
    docstring = " ".join((inspect.getdoc(KINDS[kind]) or "").split())
    name = re.split(r",|:| ``| \(| of ", docstring, maxsplit=1)[0]
    number = paper(kind)
    if number:
        name = f"{name}, [{number}](https://arxiv.org/abs/{number})"
    said = _letters(kind + name)
    also = []
    for other, its_kind in OTHER_NAMES.items():
        if its_kind == kind and _letters(other) not in said:
            also.append(other)
    if also and first_variant(kind) in variants:
        name += f"; elsewhere {', '.join(also)}"
    return name


def _letters(text: str) -> str:
    return re.sub("[^a-z0-9]", "", text.lower())


def cells(kind: str, variants: list[str]) -> list[str]:
    """The generated cells of a row; one value for each architecture, where they differ."""
    row = [name_cell(kind, variants)]
    for cell in (parameters_cell, start_cell, cost_cell):
        values = list(dict.fromkeys(cell(variant) for variant in variants))
        if len(values) > 1:
            values = [cell(variant) or "no" for variant in variants]
        row.append(" / ".join(values))
    return row


def filled(text: str) -> str:
    """The page with the generated columns of its first table filled in."""
    lines = text.split("\n")
    header = next(k for k, line in enumerate(lines) if line.startswith("| architectures |"))
    names = [name.strip() for name in lines[header].split("|")]
    places = [names.index(column) for column in COLUMNS]
    for k in range(header + 2, len(lines)):
        if not lines[k].startswith("|"):
            break
        row = lines[k].split("|")
        variants = re.findall(r"`(\w+)`", row[1])
        (kind,) = re.findall(r"`(\w+)`", row[2])
        for place, cell in zip(places, cells(kind, variants)):
            row[place] = f" {cell} " if cell else " "
        lines[k] = "|".join(row)
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args()
    os.environ["RSKIP_OPS"] = "torch"  # the operator rounds otherwise than torch
    before = PAGE.read_text("utf-8")
    after = filled(before)
    if not options.check:
        write_text(PAGE, after)
        return
    stale = [new for old, new in zip(before.split("\n"), after.split("\n")) if old != new]
    if stale:
        raise UserError("\n".join(["docs/rules.md: expected", *stale]))


if __name__ == "__main__":
    sys.exit(exit_status(main))
