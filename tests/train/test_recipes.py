"""The recipes of training are those of the table in docs/training.md."""

import re

import pytest
from conftest import ROOT

from fairseq_rskip.tools.recipes import RECIPES


def page_recipes():
    """Recipe -> its cells in the table of docs/training.md."""
    text = (ROOT / "docs" / "training.md").read_text("utf-8")
    table = text.partition("| corpus | tokens per step |")[2].partition("\n\n")[0]
    cells = {}
    for line in table.splitlines()[2:]:
        names, *others = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`([a-z0-9][\w-]*)`", names):
            cells[name] = others
    return cells


PAGE = page_recipes()


def number(text):
    return float(text.replace(",", ""))


def test_every_recipe_is_on_the_page():
    assert sorted(PAGE) == sorted(RECIPES)


@pytest.mark.parametrize("name", PAGE)
def test_a_recipe_is_what_the_page_says(name):
    tokens, warm_up, rate, dropout, ends, checkpoints = PAGE[name]
    recipe, options = RECIPES[name], RECIPES[name].options

    in_samples = re.fullmatch(r"([\d,]+)(?: in samples of (\d+))?", tokens)
    assert recipe.tokens == number(in_samples[1])
    assert options.get("tokens-per-sample") == (int(in_samples[2]) if in_samples[2] else None)
    assert options["warmup-updates"] == number(warm_up)

    is_number = re.fullmatch(r"[\d.]+", rate)
    assert options.get("lr") == (float(rate) if is_number else None)
    assert options.get("dropout") == (None if dropout == "the architecture's" else float(dropout))

    length, unit = re.match(r"([\d,]+) (updates|epochs)", ends).groups()
    assert options[{"updates": "max-update", "epochs": "max-epoch"}[unit]] == number(length)
    patience = re.search(r"or (\d+) epochs without a better validation loss", ends)
    assert options.get("patience") == (int(patience[1]) if patience else None)

    of_epochs = "last 10 epochs" in checkpoints
    assert options.get("keep-last-epochs") == (10 if of_epochs else None)
    of_updates = re.search(r"every ([\d,]+) updates, last (\d+)", checkpoints)
    interval, kept = of_updates.groups() if of_updates else ("0", None)
    assert options.get("save-interval-updates", 0) == number(interval)
    assert options.get("keep-interval-updates") == (int(kept) if kept else None)


@pytest.mark.parametrize("name", RECIPES)
def test_only_translations_are_smoothed(name):
    of_text = "tokens-per-sample" in RECIPES[name].options
    assert RECIPES[name].options.get("label-smoothing") == (None if of_text else 0.1)
