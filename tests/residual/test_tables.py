"""A rule that is registered has a row in every table that shows or proves it."""

import re
from pathlib import Path

from skip_variants import VARIANTS as EQUATIONS
from stream_rules import RULES

from fairseq_rskip.models._presets import (
    FAMILIES,
    LM_SIZES,
    SIZES,
    VARIANTS,
    SkipLanguageModelConfig,
    architectures,
    equation,
    overview,
)
from fairseq_rskip.residual import KINDS

ROOT = Path(__file__).resolve().parents[2]
KIND_OF_ARCH = {f"transformer_{variant}": skip["skip_kind"] for variant, skip in VARIANTS.items()}
KIND_OF_ARCH |= {arch: config().skip_kind for arch, config in architectures(SkipLanguageModelConfig)}


def kinds_of_documented_rows(text: str) -> set[str]:
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    return {kind for row in rows for kind in re.findall(r"`(\w+)`", row[2])}


def kinds_of_experiment(path: Path) -> set[str]:
    rows = re.findall(r"arch: (transformer_\w+)", path.read_text(encoding="utf-8"))
    return {KIND_OF_ARCH[arch] for arch in rows}


def missing() -> dict[str, set[str]]:
    """Table -> the kinds that it lacks."""
    found = {
        "fairseq_rskip/models/_presets.py VARIANTS": set(KIND_OF_ARCH.values()),
        "tests/skip_variants.py or stream_rules.py": {v.kind for v in EQUATIONS}
        | {options["kind"] for options, _ in RULES.values()},
        "docs/rules.md": kinds_of_documented_rows((ROOT / "docs" / "rules.md").read_text(encoding="utf-8")),
        "experiments/rivals.yaml": kinds_of_experiment(ROOT / "experiments" / "rivals.yaml"),
        "experiments/lm-rivals.yaml": kinds_of_experiment(ROOT / "experiments" / "lm-rivals.yaml") | {"tfixup"},
        "FAMILIES of fairseq_rskip/models/_presets.py": {
            kind for kind, cls in KINDS.items() if cls.__module__.rpartition(".")[2] in FAMILIES
        },
        "an equation in the docstring": {kind for kind in KINDS if equation(kind)},
    }
    return {table: set(KINDS) - kinds for table, kinds in found.items() if set(KINDS) - kinds}


def test_every_rule_is_in_every_table():
    assert missing() == {}


def test_a_rule_without_rows_is_missing_from_every_table(monkeypatch):
    own = type("Own", (KINDS["xskip"],), {"__doc__": "Nothing."})
    own.__module__ = "mine"
    monkeypatch.setitem(KINDS, "own", own)
    assert len(missing()) == 7 and all(kinds == {"own"} for kinds in missing().values())


def test_documented_architectures_are_those_that_there_are():
    rows = [
        line.split("|")[1] for line in (ROOT / "docs" / "rules.md").read_text("utf-8").splitlines() if line[:3] == "| `"
    ]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(VARIANTS)


def test_the_overview_shows_every_rule_and_size_once():
    lines = overview().splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert sorted(names) == sorted([*VARIANTS, *(size.lstrip("_") or "none" for size in [*SIZES, *LM_SIZES])])
    assert max(map(len, lines)) <= 130
