"""Stacks against depth: He et al.'s lambda^(L-l), Jacobians multiplied by hand."""

import csv
import math
from argparse import Namespace

import pytest
import torch
from torch import nn

from fairseq_rskip.analysis import depth
from fairseq_rskip.analysis.depth import VARIANTS, Stack, Variant, expected_rate
from fairseq_rskip.analysis.figures import select
from fairseq_rskip.errors import exit_status
from fairseq_rskip.tools import analyze

BY_NAME = {variant.name: variant for variant in VARIANTS}


def sizes(blocks, dim=64, gain=0.25, seeds=2, examples=4, tokens=4):
    return Namespace(
        blocks=blocks, dim=dim, gain=gain, seeds=seeds, examples=examples, tokens=tokens
    )


SMALL = sizes(6, dim=8, examples=3)


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def draw(*shape, seed=7):
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def two_layers(variant, blocks, dim, gain):
    weights = generator()
    branches = [depth.two_layers(dim, gain, False, weights) for _ in range(blocks)]
    return Stack(branches, [variant.skip(dim) for _ in branches])


def of(rows, quantity, name):
    return [row["mean"] for row in select(rows, quantity=quantity, variant=name)]


@pytest.mark.parametrize(
    "skip_lambda, blocks", [(0.5, 50), (1.0, 50), (2.0, 900)], ids=["half", "one", "two"]
)
def test_without_branches_the_gradient_is_exactly_the_skip_paths(skip_lambda, blocks):
    """Powers of two are exact, also far from 1, where a square would overflow."""
    stack = two_layers(Variant("x", "xskip", skip_lambda), blocks, 8, gain=0.0)
    actual = depth.gradient_norms(stack, draw(3, 8), draw(3, 8))
    assert actual.tolist() == [skip_lambda ** (blocks - block) for block in range(1, blocks + 1)]


@pytest.mark.parametrize("gain", [1e-3, 0.25, 2.0], ids=["small", "quarter", "two"])
@pytest.mark.parametrize("name", ["no skip", "1xSkip", "2xSkip"])
def test_branches_add_to_the_rate_as_their_squares(name, gain):
    """Without skips the gradient vanishes, or explodes, with the gain alone."""
    settings = sizes(20, gain=gain, tokens=2)
    rate = depth.rate(of(depth.measure(settings, [BY_NAME[name]]), "gradient", name))
    expected = math.hypot(BY_NAME[name].skip_lambda or 0, gain)
    assert rate == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", list(BY_NAME))
def test_gradients_equal_jacobians_multiplied_by_hand(name):
    """Of two examples, the mean of whose ratios is not the ratio of their means."""
    stack, xs, upstreams = two_layers(BY_NAME[name], 3, 4, gain=0.7), draw(2, 4), draw(2, 4, seed=8)

    def block(number):
        branch, skip = stack.blocks[number]
        return lambda x: skip(x, branch(x)) if skip else branch(x)

    means = torch.zeros(3, dtype=torch.float64)
    for x, upstream in zip(xs.split(1), upstreams.split(1)):
        states = [x]
        for number in range(3):
            states.append(block(number)(states[-1]).detach())
        gradient, norms = upstream.flatten(), [1.0]
        for number in (2, 1):  # from the last block's output to the first one's
            jacobian = torch.autograd.functional.jacobian(block(number), states[number])
            gradient = jacobian.reshape(4, 4).T @ gradient
            norms.insert(0, float(gradient.norm() / upstream.norm()))
        means += torch.tensor(norms, dtype=torch.float64) / 2
    actual = depth.gradient_norms(stack, xs, upstreams).tolist()
    assert actual == pytest.approx(means.tolist(), rel=1e-10)


def test_a_branch_is_measured_by_what_it_reads():
    branches = [lambda x: 3 * x, lambda x: x / 2, lambda x: 0 * x, lambda x: x]
    stack = Stack(branches, [None, Variant("x", "xskip", 2.0).skip(4), None, None])
    assert depth.branch_ratios(stack, draw(3, 4)).tolist() == pytest.approx([3, 0.5, 0, 0])


def test_the_deviation_is_that_of_two_seeds():
    """The first is v and the mean m, so that the second is 2 m - v."""
    variants = [BY_NAME["2xSkip"], BY_NAME["2rSkip+LN"]]
    one, two = (depth.measure(sizes(3, dim=8, seeds=count), variants) for count in (1, 2))
    assert {row["deviation_over_seeds"] for row in one} == {None}
    deviations = [row["deviation_over_seeds"] for row in two]
    apart = [abs(2 * m["mean"] - 2 * v["mean"]) for v, m in zip(one, two)]
    assert deviations == pytest.approx([each / 2**0.5 for each in apart])
    assert deviations[2] == 0 and min(deviations[3:9]) > 0  # the last gradient's ratio is 1


def test_a_scaled_skip_drowns_its_branches_and_a_normalised_one_does_not():
    profiles = depth.measure(sizes(20))
    drowned = of(profiles, "branch", "2xSkip")
    assert drowned[-1] / drowned[-2] == pytest.approx(0.5, rel=0.15)
    assert drowned[-1] < 1e-5 and of(profiles, "branch", "1xSkip")[-1] == pytest.approx(
        0.25 / math.sqrt(2.25), rel=0.3
    )
    for name in ("1xSkip+LN", "2xSkip+LN", "2rSkip+LN"):
        assert of(profiles, "branch", name)[-1] == pytest.approx(0.25, rel=0.15)
        assert depth.rate(of(profiles, "gradient", name)) == pytest.approx(1, abs=0.02)
    similar = {name: of(profiles, "similarity", name)[-1] for name in BY_NAME}
    assert similar["no skip"] > 0.999 > similar["1xSkip"] > similar["2xSkip"]
    assert similar["1xSkip+LN"] > similar["2xSkip+LN"] > similar["2xSkip"]


def test_attention_is_torchs():
    ours, weights = depth.self_attention(8, 2, generator()), generator()
    theirs = nn.MultiheadAttention(8, 2, bias=False, dtype=torch.float64)
    with torch.no_grad():
        for parameter, rows in ((theirs.in_proj_weight, 24), (theirs.out_proj.weight, 8)):
            parameter.copy_(depth.draw(rows, 8, generator=weights) * 8**-0.5)
        x = draw(5, 3, 8)
        normalised = nn.functional.layer_norm(x, (8,))
        torch.testing.assert_close(ours(x), theirs(normalised, normalised, normalised)[0])


def test_the_similarity_of_tokens_by_hand():
    # cosines 0, 1/sqrt(2) and 1/sqrt(2); of the second example 1, -1 and -1; lengths do not matter
    tokens = [[[3.0, 0.0], [1.0, 1.0]], [[0.0, 0.2], [5.0, 5.0]], [[1.0, 1.0], [-2.0, -2.0]]]
    actual = depth.token_similarity(torch.tensor(tokens, dtype=torch.float64))
    assert actual.tolist() == pytest.approx([math.sqrt(2) / 3, -1 / 3])


def command(stem, *arguments):
    sizes = [
        f"--{name}={getattr(SMALL, name)}"
        for name in ("blocks", "dim", "seeds", "examples", "tokens")
    ]
    return exit_status(lambda: analyze.run(["depth", "--output", str(stem), *sizes, *arguments]))


def test_the_command_writes_figure_and_table(tmp_path, capfd):
    stem = tmp_path / "độ sâu" / "depth"
    assert command(stem) == 0
    said, error = capfd.readouterr()
    # where seven stacks take more than a few seconds, their progress is shown
    assert all(line.startswith("stacks ") for line in error.split("\n") if line)
    assert [line.split("  ")[0] for line in said.splitlines()[1:-1]] == list(BY_NAME)
    assert sorted(path.name for path in stem.parent.iterdir()) == [
        "depth.csv",
        "depth.pdf",
        "depth.png",
    ]
    rows = list(csv.DictReader((stem.parent / "depth.csv").open(newline="", encoding="utf-8")))
    assert len(rows) == len(BY_NAME) * (6 + 6 + 7)
    for quantity, first in (("gradient", 1), ("branch", 1), ("similarity", 0)):
        blocks = [int(row["block"]) for row in select(rows, quantity=quantity, variant="2xSkip")]
        assert blocks == list(range(first, 7))
    doubled = [row for row in rows if (row["variant"], row["quantity"]) == ("2xSkip", "gradient")]
    assert [float(row["skip_path"]) for row in doubled] == [32, 16, 8, 4, 2, 1]
    assert [float(row["mean"]) for row in doubled] == of(depth.measure(SMALL), "gradient", "2xSkip")
    assert {row["skip_path"] for row in rows if row["variant"] in ("no skip", "2rSkip+LN")} == {""}


def test_what_cannot_be_measured_is_one_line(tmp_path, capfd):
    for arguments, message in (
        ("--dim 10", "--dim 10: expected a multiple of 4, the number of attention heads"),
        (
            "--blocks 40 --gain 1e9",
            "no skip: the gradient leaves what float64 can hold: take fewer --blocks",
        ),
    ):
        assert command(tmp_path / "x", *arguments.split()) == 1
        assert capfd.readouterr() == ("", f"error: {message}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "gain", "rate"),
    [
        ("2xSkip", 1.5, 2.5),  # 4 + 2.25 = 6.25
        ("0.5xSkip", 1.2, 1.3),  # 0.25 + 1.44 = 1.69
        ("no skip", 0.25, 0.25),
        ("no skip", -0.25, 0.25),
        ("2xSkip+LN", 0.25, None),
        ("2rSkip+LN", 0.25, None),
    ],
)
def test_the_squares_of_lambda_and_of_the_gain_add_up(name, gain, rate):
    assert expected_rate(BY_NAME[name], gain) == pytest.approx(rate)
