"""A rule that is registered has a row in every table that shows or proves it."""

import re
from pathlib import Path

import pytest
from skip_variants import VARIANTS as EQUATIONS
from stream_rules import RULES

pytest.importorskip("fairseq")

from fairseq_rskip.models import (  # noqa: E402
    nearest_architecture,
    unknown_architecture_message,
)
from fairseq_rskip.models.architectures import (  # noqa: E402
    LM_SIZES,
    SIZES,
    VARIANTS,
    arch_configs,
    first_variant,
)
from fairseq_rskip.models.flat_config import SkipLanguageModelConfig  # noqa: E402
from fairseq_rskip.models.overview import overview  # noqa: E402
from fairseq_rskip.option_error import OptionError  # noqa: E402
from fairseq_rskip.residual import KINDS  # noqa: E402
from fairseq_rskip.residual.docstrings import equation  # noqa: E402
from fairseq_rskip.residual.names import NOT_BUILT, OTHER_NAMES, usual_name  # noqa: E402
from fairseq_rskip.residual.registry import rule_of  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
KIND_OF_ARCH = {f"transformer_{variant}": skip["skip_kind"] for variant, skip in VARIANTS.items()}
KIND_OF_ARCH |= {arch: config().skip_kind for arch, config in arch_configs(SkipLanguageModelConfig)}


def documented(column: int) -> list[str]:
    """The words in code type of a column of docs/rules.md."""
    rows = [
        line.split("|")
        for line in (ROOT / "docs/rules.md").read_text("utf-8").splitlines()
        if line[:3] == "| `" and line.count("|") > 9  # not the table of calls
    ]
    return [word for row in rows for word in re.findall(r"`(\w+)`", row[column])]


def kinds_of_experiment(name: str) -> set[str]:
    return {
        KIND_OF_ARCH[a]
        for a in re.findall(r"arch: (transformer_\w+)", (ROOT / name).read_text("utf-8"))
    }


def missing() -> dict[str, set[str]]:
    """Table -> the kinds that it lacks."""
    actual = {
        "fairseq_rskip/models/architectures.py FAMILIES": set(KIND_OF_ARCH.values()),
        "tests/skip_variants.py or stream_rules.py": {
            o["kind"] for o, _ in [*EQUATIONS, *RULES.values()]
        },
        "docs/rules.md": set(documented(2)),
        "experiments/rivals.yaml": kinds_of_experiment("experiments/rivals.yaml"),
        "experiments/lm-rivals.yaml": kinds_of_experiment("experiments/lm-rivals.yaml")
        | {"tfixup"},
        "an equation in the docstring": {kind for kind in KINDS if equation(kind)},
    }
    return {table: set(KINDS) - kinds for table, kinds in actual.items() if set(KINDS) - kinds}


def numbers_in_readme() -> set[int]:
    """How many rules there are, as README says it before its results."""
    before_results = (ROOT / "README.md").read_text("utf-8").partition("## Results")[0]
    return {int(number) for number in re.findall(r"\b(\d+) rules\b", before_results)}


def test_every_rule_is_in_every_table():
    """One failure for a rule that is half finished: it names what is left to do."""
    left = [f"{table} lacks {', '.join(kinds)}" for table, kinds in missing().items()]
    left += [f"README.md: {n} rules" for n in numbers_in_readme() if n != len(KINDS)]
    assert not left, "\n".join(left)


def test_a_rule_without_rows_is_missing_from_every_table(monkeypatch):
    already = missing()
    own = type("Own", (KINDS["xskip"],), {"__doc__": "Nothing."})
    own.__module__ = "mine"
    monkeypatch.setitem(KINDS, "own", own)
    assert len(missing()) == 6
    assert all(kinds == already.get(table, set()) | {"own"} for table, kinds in missing().items())
    assert len(KINDS) not in numbers_in_readme()


def test_documented_architectures_are_those_that_there_are():
    assert sorted(documented(1)) == sorted(VARIANTS)


def test_the_rules_for_images_are_marked():
    rows = [
        line.split("|")[2]
        for line in (ROOT / "docs/rules.md").read_text("utf-8").splitlines()
        if line[:3] == "| `" and line.count("|") > 9  # not the table of calls
    ]
    marked = {re.findall(r"`(\w+)`", cell)[0]: "◦" in cell for cell in rows}
    assert marked == {kind: KINDS[kind].for_images for kind in marked}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("transformer_lm_pre-norm_tiny", "transformer_lm_preln_tiny"),
        ("transformer_postnorm", "transformer_postln"),
        ("transformer_2rskip_tiny", "transformer_rskip_ln_tiny"),
        ("transformer_rskip_lm", "transformer_rskip_ln"),
        ("transformer_lm_muddformer_tiny", "transformer_lm_mudd_tiny"),
        ("Gated Transformer-XL", "transformer_gtrxl"),
        ("transformer_ResiDual", "transformer_residual_dual"),
        ("Hyper-connections", "transformer_hyper"),
        ("delta attention residuals", "transformer_delta_attnres"),
    ],
)
def test_a_rule_that_is_written_otherwise_is_suggested(written, meant):
    assert f"did you mean {meant}? " in unknown_architecture_message(written)


@pytest.mark.parametrize("name", ["transformer_haares", "lm_sHC", "transformer_HybridNorm"])
def test_a_rule_that_is_not_built_is_not_taken_for_another(name):
    assert " is not built (docs/rules.md says why); x" in nearest_architecture(name, "x")
    rule = name.removeprefix("transformer_").removeprefix("lm_")
    with pytest.raises(OptionError, match="is not built"):
        rule_of(rule)


def test_a_name_that_is_like_no_other_has_no_suggestion():
    assert nearest_architecture("transformer_qwen", "x") == "x"


@pytest.mark.parametrize("rule", NOT_BUILT)
def test_what_is_not_built_is_on_the_page(rule):
    assert rule.lower() in (ROOT / "docs/rules.md").read_text("utf-8").lower()


@pytest.mark.parametrize("other", OTHER_NAMES)
def test_a_name_from_elsewhere_leads_to_the_rule(other):
    kind = OTHER_NAMES[other]
    together = other.lower().replace(" ", "").replace("-", "")
    assert usual_name(other) == usual_name(together) == kind
    assert usual_name(f"transformer_lm_{other}s_tiny") == f"transformer_lm_{kind}_tiny"
    assert f"did you mean transformer_{first_variant(kind)}? " in nearest_architecture(other, "x")
    if other not in KINDS:
        with pytest.raises(OptionError, match=rf"did you mean {kind}\?") as refused:
            rule_of(other)
        assert "one of" not in str(refused.value)  # 60 names before the one that is meant


def test_the_overview_shows_every_rule_and_size_once():
    lines = overview().splitlines()
    names = [line.split()[0] for line in lines if re.match(r"  \S", line)]
    assert sorted(names) == sorted(
        [*VARIANTS, *(size.lstrip("_") or "none" for size in [*SIZES, *LM_SIZES])]
    )
    assert max(map(len, lines)) <= 120
