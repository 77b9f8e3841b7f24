"""The error of an option: the same parts in the spelling of Python, command lines and YAML."""

import pickle

import pytest

from fairseq_rskip.flags import option_name
from fairseq_rskip.option_error import (
    InYaml,
    OnCommandLine,
    OptionError,
    RefusedOption,
    UnknownOption,
    refused,
)
from fairseq_rskip.residual import create_skip

CASES = {
    "a value": (
        ("rskip", {"skip_lambda": -1}),
        "skip_lambda=-1: expected an integer from 1 to 1,000 for rskip",
        "--skip-lambda -1: expected an integer from 1 to 1,000 for rskip",
        "skip-lambda: -1; expected an integer from 1 to 1,000 for rskip",
    ),
    "beside another": (
        ("askip", {"adapt": "mixture", "halt_cost": 0.1}),
        "halt_cost=0.1: expected 0 with adapt='mixture'",
        "--skip-halt-cost 0.1: expected 0 with --skip-adapt mixture",
        "skip-halt-cost: 0.1; expected 0 with skip-adapt: mixture",
    ),
    "a limit that another sets": (
        ("askip", {"skip_lambda": 5.0, "max_steps": 3}),
        "skip_lambda=5.0: expected a number from 1 to 3 with max_steps=3",
        "--skip-lambda 5: expected a number from 1 to 3 with --skip-max-steps 3",
        "skip-lambda: 5; expected a number from 1 to 3 with skip-max-steps: 3",
    ),
    "unknown": (
        ("preln", {"gate_bias": 1}),
        "gate_bias=1: kind preln has no such option; it has norm, norm_alpha, drop_path, ",
        "--skip-gate-bias 1: kind preln has no such option; it has --skip-norm, --skip-norm-alpha",
        "skip-gate-bias: 1; kind preln has no such option; it has skip-norm, skip-norm-alpha, ",
    ),
    "a kind": (
        ("hihgway", {}),
        "kind='hihgway': expected a kind that docs/rules.md lists (did you mean highway?)",
        "--skip-kind hihgway: expected a kind that docs/rules.md lists (did you mean highway?)",
        "skip-kind: hihgway; expected a kind that docs/rules.md lists (did you mean highway?)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_is_written_as_its_reader_writes_options(case):
    (kind, options), python, words, yaml = CASES[case]
    with pytest.raises(OptionError) as raised:
        create_skip(kind, 64, **options)
    error = raised.value
    assert isinstance(error, ValueError) and str(error).startswith(python)

    renamed = error.renamed(option_name)
    assert renamed.message(OnCommandLine()).startswith(words)
    assert renamed.message(InYaml()).startswith(yaml)
    assert str(RefusedOption(renamed, "--arch a")).startswith(f"--arch a: {words}")


@pytest.mark.parametrize(
    "error",
    [
        OptionError("n", 1, "2", {"m": 3}, "because"),
        UnknownOption("n", 1, "rskip", ["m"], "a hint"),
        refused("n", 1, "2"),
    ],
    ids=["a value", "unknown", "of a command line"],
)
def test_an_error_survives_the_way_to_another_process(error):
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_list_and_a_switch_are_written_as_their_reader_writes_them():
    seeds, switch = refused("seeds", (1, 1), "others"), refused("flip", True, "no flip")
    assert str(seeds) == "--seeds 1 1: expected others"
    assert seeds.error.message(InYaml()) == "seeds: [1, 1]; expected others"
    assert str(switch) == "--flip: expected no flip"
    assert switch.error.message(InYaml()) == "flip: true; expected no flip"
