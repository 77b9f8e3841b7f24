"""What docs/rules.md says of each rule's size and start is what its model has."""

import csv
import functools
import re
import runpy
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from transformer_helpers import batch, build, sentences

from fairseq_rskip.models.architectures import VARIANTS
from fairseq_rskip.residual import skip_stack

SCRIPT = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "rules_table.py")))
PAGE = (ROOT / "docs" / "rules.md").read_text("utf-8")
SMALL = {
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_embed_dim": 32,
    "encoder_ffn_embed_dim": 48,
}
SMALL_LM = {
    "decoder_layers": 6,
    "decoder_embed_dim": 32,
    "decoder_input_dim": 32,
    "decoder_output_dim": 32,
    "decoder_ffn_embed_dim": 48,
    "tokens_per_sample": 64,
    "max_target_positions": 64,
}
BASELINES = {"pre-norm": "preln", "post-norm": "postln"}
TASKS = ["translation", "language model"]


def claims() -> dict[str, tuple[str, str, str]]:
    """Architecture -> its cells "parameters", "at the start" and "step, memory"."""
    actual = {}
    for line in PAGE.splitlines():
        row = [cell.strip() for cell in line.split("|")]
        if not line.startswith("| `") or len(row) < 9:
            continue
        variants = re.findall(r"`(\w+)`", row[1])
        columns = [cell.split(" / ") for cell in row[6:9]]
        for k, variant in enumerate(variants):
            actual[variant] = tuple(cells[k] if len(cells) > 1 else cells[0] for cells in columns)
    return actual


CLAIMS = claims()


def parameters(variant: str) -> int:
    """Count the parameters of the skip connections of width 512 with 6+6 layers.

    Those of the norms at the stacks' ends are counted, too.
    """
    chosen = {name: value for name, value in VARIANTS[variant].items() if name != "fix_norm"}
    kind = chosen.pop("skip_kind")
    options = {
        name if name == "skip_lambda" else name.removeprefix("skip_"): value
        for name, value in chosen.items()
    }
    encoder, decoder = ("self_attn", "ffn"), ("self_attn", "encoder_attn", "ffn")
    stacks = [
        skip_stack(kind, 512, 6, encoder, other_layers=6, other_sublayers=3, **options),
        skip_stack(
            kind, 512, 6, decoder, side="decoder", other_layers=6, other_sublayers=2, **options
        ),
    ]
    last = [stack[-1]["ffn"] for stack in stacks]
    ends = [skip.new_norm(final_norm(skip)) for skip in last if skip.needs_final_norm()]
    return sum(p.numel() for part in (*stacks, *ends) for p in part.parameters())


def final_norm(skip) -> str:
    """The norm of a stack's end: the rule's own, layer norm in rules without."""
    return "layer" if skip.options.norm == "none" else skip.options.norm


@functools.cache
def logits(variant: str, task: str) -> torch.Tensor:
    source, lengths, previous = batch(sentences())
    with torch.no_grad():
        if task == "language model":
            return build(f"transformer_lm_{variant}_tiny", **SMALL_LM)(previous)[0]
        return build(f"transformer_{variant}_tiny", **SMALL)(source, lengths, previous)[0]


def test_every_architecture_has_a_row():
    assert sorted(CLAIMS) == sorted(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rule_has_the_parameters_that_its_row_says(variant):
    """Of the model of width 512 with 6+6 layers, more than pre-norm."""
    cell = CLAIMS[variant][0].replace(",", "").replace("−", "-")
    assert int(cell) == parameters(variant) - parameters("preln")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "admin"])
def test_a_rule_starts_as_its_row_says(variant, task, stock_operators):
    """Admin starts only with a batch. What a row does not claim is off by more than 1 %."""
    if (variant, task) == ("tfixup", "language model"):
        pytest.skip("T-Fixup is derived for an encoder and a decoder")
    claim, actual = CLAIMS[variant][1], logits(variant, task)
    for name, plain in BASELINES.items():
        expected = logits(plain, task)
        difference = (actual - expected).abs().max() / expected.std()
        if claim == f"= {name}":
            assert torch.equal(actual, expected)
        elif claim == f"≈ {name}":
            assert 0 < difference <= 0.003
        else:
            assert difference > 0.01


def test_a_rule_has_the_costs_that_were_measured():
    with (ROOT / "results" / "rule_cost.csv").open(encoding="utf-8") as file:
        rows = {row["rule"]: row for row in csv.DictReader(file)}
    assert sorted([*rows, "preln", "admin"]) == sorted(VARIANTS)
    for variant, row in rows.items():
        assert CLAIMS[variant][2] == f"{float(row['step']):.2f}, {float(row['kept']):.2f}"


def test_the_script_fills_in_what_the_page_has(stock_operators):
    """For three rows; the tests above have all of them."""
    lines = PAGE.split("\n")
    chosen = ("| architectures |", "|---", "| `preln`", "| `mudd`", "| `scalenorm`")
    table = [line for line in lines if line.startswith(chosen)]
    start = next(k for k, line in enumerate(table) if line.startswith("| architectures |"))
    table = table[start : start + 5]
    emptied = [
        "|".join([*row[:3], " ", *row[4:6], " ", " ", " ", *row[9:]])
        if row[1][:2] == " `"
        else "|".join(row)
        for row in (line.split("|") for line in table)
    ]
    assert emptied != table
    assert SCRIPT.filled("\n".join(emptied)).split("\n") == table
