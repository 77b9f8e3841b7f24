"""The card of an exported model, written from plain values."""

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml

from fairseq_rskip.residual import create_skip, own_rules
from fairseq_rskip.tools.export import images
from fairseq_rskip.tools.export.card import Card, escape, rule_line, write
from fairseq_rskip.version import __version__
from fairseq_rskip.vision.config import Config

PLAIN = Card(header={}, title="A model", scores=[], example="model")


@pytest.fixture
def write_card(tmp_path):
    """Write the card of a model of these modules; returns its header and the text below it."""

    def text_of(*modules, card=PLAIN, licence="mit"):
        path = tmp_path / "README.md"
        write(path, card, torch.nn.ModuleList(modules), licence)
        _, header, text = path.read_text("utf-8").split("---\n", 2)
        return header, text

    return text_of


def test_the_header_has_licence_entries_of_the_model_and_kinds_in_this_order(write_card):
    skips = [create_skip(kind, 4) for kind in ("xskip", "rskip", "xskip")]
    entries = {"pipeline_tag": "translation", "library_name": "fairseq"}
    header, _ = write_card(*skips, card=dataclasses.replace(PLAIN, header=entries))
    assert header == (
        "license: mit\n"
        "pipeline_tag: translation\n"
        "library_name: fairseq\n"
        "tags:\n- fairseq_rskip\n- xskip\n- rskip\n"
    )


def test_parameters_are_counted_one_by_one_with_a_comma_at_thousands(write_card):
    _, text = write_card(torch.nn.Linear(40, 30))
    assert "\n1,230 parameters. " in text


def test_title_licence_and_scores_are_shown_letter_by_letter(write_card):
    words = r"R&D &lt; \*x\* <b>"
    shown = r"R&amp;D &amp;lt; \\\*x\\\* &lt;b>"
    card = dataclasses.replace(PLAIN, title=words, scores=[words])
    header, text = write_card(card=card, licence=words)
    assert yaml.safe_load(header)["license"] == words
    assert f"\n# {shown}\n" in text
    assert f"Licence of the weights: {shown}.\n" in text
    assert f"\n* {shown}\n" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("_b_ and __c__", r"\_b\_ and \_\_c\_\_"),
        ("# a heading", r"\# a heading"),
        ("~~gone~~", r"\~\~gone\~\~"),
        ("transformer_rskip_ln", "transformer_rskip_ln"),
    ],
)
def test_no_markdown_has_an_effect_and_names_stay_as_they_are(text, shown):
    assert escape(text) == shown


def test_files_of_own_rules_are_named_before_the_package_is_imported(write_card, monkeypatch):
    files = {"xskip": Path("/rules/b.py"), "wskip": Path("/rules/a.py"), "rskip": None}
    monkeypatch.setattr(own_rules, "file_of", files.get)
    _, text = write_card(*(create_skip(kind, 4) for kind in files))
    _, code, _ = text.split("```", 2)
    names, loading = code.split("\nimport fairseq_rskip\n")
    assert 'os.environ["RSKIP_RULES"] = "DIR/a.py:DIR/b.py"\n' in names
    assert 'from_pretrained("DIR")' in loading


def test_the_card_of_a_network_for_images_installs_what_images_need(write_card):
    result = {
        "config": dataclasses.asdict(Config(data="digits")),
        "error": 1.0,
        "test_images": 359,
        "train_images": 1438,
        "seed": 1,
        "classes": 10,
    }
    card, _ = images.describe(Path(), {"depth": 20, "skip": {"kind": "rskip"}}, result)
    _, text = write_card(card=card)
    assert "\n# pip install '.[vision]'\n" in text


def test_a_note_is_a_paragraph_below_the_example(write_card):
    _, text = write_card(card=dataclasses.replace(PLAIN, note="Some words."))
    assert "model\n```\n\nSome words.\n\nSkip connections" in text


def test_the_last_line_has_the_versions_of_the_package_and_of_torch(write_card):
    _, text = write_card()
    assert text.endswith(
        f" Exported with fairseq_rskip {__version__}, torch {torch.__version__}.\n"
    )


@pytest.mark.parametrize(
    ("weights", "shown"),
    [
        ([12.3456, 0.123456, 1.0], "0.1235 to 12.35"),
        ([1.00001, 1.00002], "1"),
    ],
    ids=["differ", "equal to four digits"],
)
def test_a_coefficient_has_four_digits_and_its_smallest_and_largest_value(weights, shown):
    blocks = [create_skip("wskip", 4, init=weight) for weight in weights]
    assert rule_line(blocks).startswith(f"* `wskip` (alpha 1, weight {shown}): ")
