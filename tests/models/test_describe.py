"""``python -m fairseq_rskip describe``: what it prints is what the model is."""

import math
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, run_command
from transformer_helpers import ALL_TINY

from fairseq_rskip.__main__ import main
from fairseq_rskip.models.architectures import LM_SIZES
from fairseq_rskip.safe_load import load_checkpoint
from fairseq_rskip.tools import description

TINY = (
    "--encoder-embed-dim 32 --encoder-ffn-embed-dim 48 --encoder-layers 2 --decoder-layers 2"
).split()
DYT = ["--skip-norm", "dyt", "--skip-norm-alpha", "2"]


@pytest.fixture(autouse=True)
def one_implementation(monkeypatch, stock_operators):
    """Let no kernel be built and no batch be profiled.

    fairseq-train's trainer, which other tests import, is not there.
    """
    monkeypatch.delitem(sys.modules, "fairseq.trainer", raising=False)


def described(arch, *options):
    return [
        row._asdict() for row in description.describe_skips(description.build(arch, [*options]))
    ]


def test_a_transformers_skips_in_order_with_constants_norms_and_parameters(capsys):
    words = ["transformer_periln_tiny", *TINY, "--decoder-layers", "1", "--skip-norm", "rms"]
    places = [(skip["side"], skip["layer"], skip["sublayer"]) for skip in described(*words)]
    assert places[:4] == [
        ("encoder", layer, name) for layer in (0, 1) for name in ("self_attn", "ffn")
    ]
    assert places[4:] == [("decoder", 0, name) for name in ("self_attn", "encoder_attn", "ffn")]
    for skip in described(*words):
        assert (skip["rule"], skip["norms"]) == ("periln", {"before": "rms", "branch": "rms"})
        assert (skip["rule_parameters"], skip["norm_parameters"]) == (0, 64)
    attention, ffn = 4 * (32 * 32 + 32), 2 * 32 * 48 + 32 + 48
    parameters = 4 * attention + 3 * ffn + 7 * 64 + 2 * 32  # the last: each side's last norm
    assert main(["describe", *words]) == 0
    assert (
        f": 7 skip connections with 448 of {parameters:,} parameters, emb"
        in capsys.readouterr().out
    )


def test_what_is_no_single_number_says_so(capsys):
    assert main(["describe", "transformer_lm_gru_gate_tiny"]) == 0
    out = capsys.readouterr().out
    assert "mean branch_bias=0.6667 stream_bias=0" in out  # of b = 2, 0, 0 and of zeros
    assert main(["describe", "transformer_xskip_ln_tiny", "--skip-lambda=auto"]) == 0
    out = capsys.readouterr().out
    assert "xskip λ=2 " in out and "xskip: y = G(lambda * x + alpha * F)" in out
    assert "λ is auto's estimate from the number of residuals (docs/depth.md)" in out


def test_the_share_of_dropped_branches_is_shown():
    """It grows with the depth, to the one that was asked for."""
    skips = described("transformer_xskip_ln_tiny", "--skip-drop-path", "0.1")
    assert max(skip["constants"]["drop"] for skip in skips) == pytest.approx(0.1)


def test_a_language_model_is_a_decoder_alone():
    skips = described("transformer_lm_deepnorm_tiny", "--decoder-layers", "6")
    assert [(skip["side"], skip["sublayer"]) for skip in skips] == 6 * [
        ("decoder", "self_attn"),
        ("decoder", "ffn"),
    ]
    assert {round(skip["constants"]["lambda"], 4) for skip in skips} == {round(12**0.25, 4)}


def test_a_parameter_that_a_layer_shares_is_counted_once():
    counts = [skip["rule_parameters"] for skip in described("transformer_rezero_tiny")]
    assert counts == [1, 0, 1, 0, 1, 0, 0, 1, 0, 0]


def test_layers_that_are_alike_are_one_row_that_fits_a_terminal(capsys):
    options = ["--encoder-layers", "9", "--skip-post-share", "0.34"]
    assert main(["describe", "transformer_mixln_tiny", *options]) == 0
    first, ops, head, *lines, columns, formula = capsys.readouterr().out.splitlines()
    assert first.startswith("transformer_mixln_tiny: 24 skip connections with 3,072 of ")
    assert first.endswith(" parameters, embeddings and output projection not counted")
    assert ops == "sums and the norms after them computed by torch (RSKIP_OPS=torch)"
    assert head.split() == ["place", "rule", "norm", "added", "std", "/", "Xavier's"]
    assert [line.split()[:3] for line in lines] == [
        *(["encoder", layers, name] for layers in ("0-2", "3-8") for name in ("self_attn", "ffn")),
        *(["decoder", "0-1", name] for name in ("self_attn", "encoder_attn", "ffn")),
    ]
    assert lines[0].split()[3:8] == ["mixln", "a=0.34", "after", "layer", "128"]
    assert formula.startswith("mixln: ") and formula.endswith(" (arXiv 2412.13795; docs/rules.md)")
    assert columns.startswith("added: parameters of rule and norm; std / Xavier's: ")
    assert max(map(len, [*lines, columns])) <= 90


def test_matrices_of_one_deviation_are_together_wherever_they_stand():
    row = SimpleNamespace(std={"q": 1.0, "k": 0.5, "out": 1.001})
    assert description._spans([row, row]) == "q,out 1.00 k 0.50"


def test_every_architecture_is_described():
    for arch in ALL_TINY:
        skips = described(arch, *TINY)
        assert len(skips) == 10
        assert all(skip["std"] and math.isfinite(sum(skip["std"].values())) for skip in skips)


def test_a_resnet_takes_the_options_of_train_cifar():
    actual = described(
        "resnet20", "--skip-kind", "xskip", "--skip-lambda", "3", "--skip-norm", "rms"
    )
    assert [skip["layer"] for skip in actual] == list(range(9))
    first = actual[0]
    assert (first["side"], first["constants"]["lambda"], first["norms"]) == (
        "resnet",
        3,
        {"after": "rms"},
    )
    assert first["std"]["conv2"] == pytest.approx(
        math.sqrt(2 / (9 * 16)) * math.sqrt(32 * 9 / 2), rel=0.05
    )


@pytest.mark.slow
def test_a_checkpoint_is_described_with_its_weights(translator, tmp_path, capsys):
    """Deviations of the trained matrices come from the file itself.

    They are taken over Xavier's sqrt(2 / (inputs + outputs)).
    """
    checkpoint = translator[1] / "checkpoint_last.pt"
    weights = load_checkpoint(checkpoint, map_location="cpu")["model"]
    first = described(str(checkpoint))[1]
    assert (first["rule"], first["sublayer"], first["constants"]["lambda"]) == ("rskip", "ffn", 2)
    fc1 = weights["encoder.layers.0.fc1.weight"].double()
    expected = float(fc1.std(unbiased=False)) / math.sqrt(2 / sum(fc1.shape))
    assert first["std"]["fc1"] == pytest.approx(expected, abs=1e-4)

    run = tmp_path / "seed1"
    run.mkdir()
    (run / "checkpoints").symlink_to(translator[1])
    capsys.readouterr()
    assert len(described(str(run))) == 5
    assert capsys.readouterr().out == f"checkpoint {run}/checkpoints/checkpoint_best.pt\n"


def test_a_resnets_checkpoint_is_described_with_its_weights(whole):
    skips = described(str(whole / "checkpoint.pt"))
    assert skips == described(str(whole)) and skips[0]["side"] == "resnet"
    weights = load_checkpoint(whole / "checkpoint.pt", map_location="cpu")["model"]
    matrix = next(value for name, value in weights.items() if name.endswith("conv2.weight"))
    expected = float(matrix.double().std(unbiased=False))
    fan = matrix[0].numel() + matrix[:, 0].numel()
    assert skips[0]["std"]["conv2"] == pytest.approx(expected / math.sqrt(2 / fan), abs=1e-4)


@pytest.mark.parametrize(
    ("argv", "status", "named"),
    [
        ("nowhere/checkpoint_last.pt", 1, "nowhere/checkpoint_last.pt does not exist"),
        (f"{ROOT} --depth 2", 1, "is a trained model: expected no options"),
        (f"{ROOT}/tests", 1, "has no checkpoint"),
        ("transformer_depnorm", 1, "transformer_deepnorm?"),
        ("resnet20 --depth 14", 1, "resnet14"),
        ("resnet20 --skip-kind preln", 1, "--skip-kind preln: expected a kind for images"),
        ("transformer_preln_tiny --nosuch 7", 2, "argument --nosuch"),
        ("", 2, "ARCH"),
    ],
)
def test_a_mistake_is_one_line(capsys, argv, status, named):
    try:
        actual = main(["describe", *argv.split()])
    except SystemExit as ended:
        actual = ended.code
    shown = capsys.readouterr()
    assert actual == status and not shown.out
    assert shown.err.startswith("error: ") and named in shown.err and shown.err.count("\n") == 1


def test_the_folder_and_help_need_neither_torch_nor_fairseq():
    program = (
        "import sys; sys.modules.update(torch=None, fairseq=None); "
        "import fairseq_rskip.__main__ as m; m.main({})"
    )
    for argv, expected in (
        ([], "fairseq_rskip\n"),
        (["--version"], "fairseq_rskip 0"),
        (["describe", "-h"], "ARCH"),
    ):
        done = run_command([sys.executable, "-c", program.format(argv)])
        assert expected in done.stdout and done.returncode == 0, done.stderr


def test_initial_values_of_a_norm_and_of_a_reading_gate_are_shown():
    norms = {row["norms"]["after"] for row in described("transformer_lm_postln_tiny", *DYT)}
    assert norms == {"dyt α=2"}
    gates = described("transformer_lm_mhc_tiny", "--skip-read-bias", "1")
    assert {row["constants"]["b_pre"] for row in gates} == {1.0}  # and -1 of the other streams


@pytest.mark.parametrize("size", LM_SIZES)
def test_every_size_of_language_model_is_described(capsys, size):
    """The embeddings of _wiki103 are cut at numbers of words that only a corpus has."""
    layers = ["--decoder-layers", "1", "--decoder-embed-dim", "96"]
    assert main(["describe", f"transformer_lm_mhc{size}", *layers]) == 0
    first, *_, equation = capsys.readouterr().out.splitlines()
    assert " skip connections with " in first
    assert equation.endswith(" (arXiv 2512.24880; docs/rules.md)")


@pytest.mark.parametrize(("rule", "matrix"), [("mhc", "sinkhorn"), ("jpmhc", "cayley")])
def test_an_option_that_is_a_word_is_shown(capsys, rule, matrix):
    assert main(["describe", f"transformer_lm_{rule}_tiny"]) == 0
    assert f" mhc matrix={matrix} n=4 " in capsys.readouterr().out
