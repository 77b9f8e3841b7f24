"""--skip-log-interval in fairseq-train: what is written, and that training does not notice."""

import sys
from types import SimpleNamespace

import fairseq.trainer  # noqa: F401  (whoever trains has imported it)
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, run_checked, skip_lines
from fairseq.logging import progress_bar
from transformer_helpers import TINY, batch, build, dictionary, randomise, sentences

from fairseq_rskip.analysis import curves, depth_check
from fairseq_rskip.compat import load_checkpoint
from fairseq_rskip.modules import skip_log
from fairseq_rskip.modules.skip_log import SkipLog
from fairseq_rskip.modules.step_hooks import attach
from fairseq_rskip.residual import SkipConnection

QUANTITIES = ("skip_x_to_F", "skip_F_over_x", "skip_bF_over_ax", "skip_grad_norm")
BLOCK = "decoder.layers.1.encoder_attn_skip"
SCALE = 128.0


class Optimizer:
    """What ``train_step`` asks of fairseq's fp16 optimizer."""

    scaler = SimpleNamespace(loss_scale=SCALE)

    def backward(self, loss):
        (loss * SCALE).backward()


def token_losses(logits, target):
    """Sum over tokens and their number, padding left out, as fairseq's cross_entropy does it."""
    kept = target.ne(dictionary().pad())
    return F.cross_entropy(logits[kept].double(), target[kept], reduction="sum"), int(kept.sum())


def train_step(sample, model, criterion, optimizer, update_num, ignore_grad=False):
    """The forward and backward pass of fairseq's ``FairseqTask.train_step``."""
    model.train()
    loss, count = token_losses(model(*sample)[0], sample[2].roll(-1, 1))
    optimizer.backward(loss * 0 if ignore_grad else loss)
    return loss, count, {}


def same(a, b):
    """Equal bit for bit, but for a buffer that fairseq leaves uninitialised."""
    return a.keys() == b.keys() and all(
        torch.equal(a[name], b[name]) for name in a if "_float_tensor" not in name
    )


@pytest.fixture
def model():
    made = build("transformer_rskip_ln_tiny", dropout=0.0, **TINY)
    randomise(made)
    return made


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(skip_log.Folder, "path", str(tmp_path))
    return tmp_path / "skip"


def run(log, model, updates, sample=None, **options):
    for update in updates:
        log(sample or batch(sentences()), model, None, Optimizer(), update, **options)
    return log


def read_scalars(folder):
    """tag -> update -> value of what was logged."""
    steps = skip_lines(folder / "skips.jsonl")
    return {
        tag: {s: actual[tag] for s, actual in steps.items() if tag in actual}
        for v in steps.values()
        for tag in v
    }


def written(log, folder):
    """What ``log`` wrote; it writes no more."""
    log.writer.close()
    return read_scalars(folder)


def by_hand(model, sample, name=BLOCK, target=None):
    """Return the four figures of a block whose skip is rskip, λ = 2.

    They are made by autograd on a model that nobody watches.
    """
    skip, seen = model.get_submodule(name), {}

    def keep(module, arguments, y):
        seen.update(x=arguments[0], f_x=arguments[1], y=y)
        y.retain_grad()

    handle = skip.register_forward_hook(keep)
    loss, count = token_losses(
        model(*sample)[0], sample[2].roll(-1, 1) if target is None else target
    )
    loss.backward()
    handle.remove()
    x, f_x, gradient = (
        tensor.detach().double() for tensor in (seen["x"], seen["f_x"], seen["y"].grad)
    )
    sigma = ((x + f_x).var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    scale = skip.post[0].weight.detach().double() / sigma
    of_x, of_branch = (1 + scale) * x, scale * f_x  # in the second sum, x + y_1
    ratio = (1 + scale) / scale
    rows = []
    for k in range(x.size(1)):
        kept = sample[2][k].ne(dictionary().pad())
        part = [tensor[kept, k] for tensor in (x, f_x, gradient, of_x, of_branch)]
        norms = [torch.linalg.vector_norm(tensor) for tensor in part]
        quotients = [ratio[kept, k].mean(), norms[1] / norms[0], norms[4] / norms[3]]
        rows.append([*quotients, norms[2] * x.size(1) / count])
    return torch.tensor(rows).mean(0).tolist()


def test_the_figures_are_those_computed_by_hand(model, folder):
    sample = batch(sentences())
    actual = written(run(SkipLog(train_step, model, 2), model, range(4), sample), folder)
    model.zero_grad()
    assert (
        len(actual)
        == (4 + 4 + 1) * sum(isinstance(module, SkipConnection) for module in model.modules())
        == (4 + 4 + 1) * 10
    )
    expected = by_hand(model, sample)
    for quantity, value in zip(QUANTITIES, expected):
        values = actual[f"{quantity}/{BLOCK}"]
        assert values.keys() == {2, 4}
        assert values[2] == values[4] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(
    "arch", ["transformer_xskip_tiny", "transformer_wskip_ln_tiny", "transformer_rskip_bn_tiny"]
)
def test_every_kind_has_all_figures_and_trains_the_same(folder, arch):
    """Running statistics included: the second reading of a batch must not count."""
    states = []
    for interval in (100, 1):
        model = build(arch, dropout=0.1, **TINY)
        torch.manual_seed(2)
        log = run(SkipLog(train_step, model, interval), model, range(2))
        gradients = {
            f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()
        }
        states.append({**model.state_dict(), **gradients})
    assert same(*states)
    actual = written(log, folder)
    assert all(values.keys() == {1, 2} for values in actual.values())
    assert sum(tag.startswith(QUANTITIES) for tag in actual) == 40


def test_weights_and_biases_is_sent_the_same_figures(model, folder, monkeypatch):
    sent = {}
    api = SimpleNamespace(
        log=lambda values, step: sent.update({step: values})
    )  # of a run, as fairseq begins it
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=api))
    actual = written(run(SkipLog(train_step, model, 2), model, range(4)), folder)
    assert len(actual) == 90
    assert sent == {
        step: {f"skip/{tag}": values[step] for tag, values in actual.items()} for step in (2, 4)
    }


def test_what_was_logged_of_updates_that_are_done_again_is_void(model, folder):
    """The first process is killed after update 5, its checkpoint is of update 3.

    The second process logs every fourth.
    """
    written(run(SkipLog(train_step, model, 1), model, range(5)), folder)
    actual = written(run(SkipLog(train_step, model, 4), model, range(3, 8)), folder)
    assert all(values.keys() == {1, 2, 3, 4, 8} for values in actual.values())


def test_an_updates_first_batch_is_logged_but_no_dummy_or_overflow(model, folder):
    log = SkipLog(train_step, model, 1)
    run(log, model, [0], ignore_grad=True)
    overflowing = SimpleNamespace(
        scaler=Optimizer.scaler, backward=lambda loss: (loss * float("inf")).backward()
    )
    log(batch(sentences()), model, None, overflowing, 0)
    assert not folder.exists()
    first, second = batch(sentences(seed=3)), batch(sentences(seed=4))
    run(log, model, [0], first)
    run(log, model, [0], second)
    actual = written(log, folder)
    model.zero_grad()
    assert actual[f"skip_F_over_x/{BLOCK}"] == {
        1: pytest.approx(by_hand(model, first)[1], rel=1e-5)
    }


def test_the_factor_of_the_loss_is_that_of_either_scaler():
    """--fp16 has fairseq's own, --amp torch's; in fp32 there is none."""
    scalers = [Optimizer.scaler, torch.amp.GradScaler("cpu", init_scale=8.0), None]
    actual = [skip_log.loss_scale(SimpleNamespace(scaler=scaler)) for scaler in scalers]
    assert [*actual, skip_log.loss_scale(SimpleNamespace())] == [SCALE, 8.0, 1.0, 1.0]


def test_off_and_where_nobody_trains_nothing_is_wrapped(monkeypatch, model):
    build_bar = progress_bar.progress_bar
    off = SimpleNamespace(train_step=train_step)
    attach(off, model, 0)
    monkeypatch.delitem(sys.modules, "fairseq.trainer")  # as in fairseq-generate
    attach(off, model, 100)
    assert off.train_step is train_step and progress_bar.progress_bar is build_bar


def train(corpus, save_dir, *options):
    """Run a real fairseq-train of 4 updates of 2 batches unless ``options`` say else.

    Returns what it says, and its weights.
    """
    command = ["fairseq-train", corpus, "--user-dir", ROOT / "fairseq_rskip", "--cpu"]
    command += (
        "--arch transformer_rskip_ln_tiny --encoder-embed-dim 32 --encoder-ffn-embed-dim 32 "
        "--optimizer adam --lr 0.003 --max-tokens 400 --update-freq 2 --max-update 4 "
        "--num-workers 0 --source-lang src --target-lang tgt --disable-validation "
        "--no-epoch-checkpoints"
    ).split()
    command += ["--save-dir", save_dir, "--tensorboard-logdir", save_dir / "events", *options]
    return run_checked(command), load_checkpoint(save_dir / "checkpoint_last.pt")["model"]


@pytest.mark.slow
def test_fairseq_train_logs_trains_alike_and_resumes_at_another_interval(tiny_corpus, tmp_path):
    _, plain = train(tiny_corpus, tmp_path / "plain", "--max-update", "6")
    assert not (tmp_path / "plain" / "events" / "skip").exists()
    log, _ = train(tiny_corpus, tmp_path / "watched", "--skip-log-interval", "2")
    assert "skip_x_to_F" not in log
    folder = tmp_path / "watched" / "events" / "skip"
    actual = read_scalars(folder)
    assert len(actual) == 90 and all(values.keys() == {2, 4} for values in actual.values())
    _, watched = train(
        tiny_corpus, tmp_path / "watched", "--max-update", "6", "--skip-log-interval", "3"
    )
    assert same(plain, watched)
    assert all(values.keys() == {2, 4, 6} for values in read_scalars(folder).values())
    (rows,) = curves.read_skips(tmp_path / "watched")
    assert {row["step"] for row in rows} == {2, 4, 6}
    assert (
        load_checkpoint(tmp_path / "watched" / "checkpoint_last.pt")["cfg"]["model"][
            "skip_log_interval"
        ]
        == 3
    )


def test_skips_that_pass_on_too_little_of_the_gradient_are_warned_of_once(
    model, folder, monkeypatch, caplog
):
    monkeypatch.setattr(depth_check, "weight_of_x", lambda t, cosine: 0.1)
    log = SkipLog(train_step, model, interval=50)
    run(log, model, (49, 99))
    assert "pass on" not in caplog.text
    run(log, model, (149, 199))
    log.writer.close()
    (warning,) = [line for line in caplog.messages if "pass on" in line]
    assert "the residuals of the encoder pass on 1/" in warning
    assert "the residuals of the decoder pass on 1/" in warning
    assert warning.count("most of it lost in layers 1-2") == 2


def test_streams_that_are_copies_are_warned_of_once(folder, caplog):
    """Every gate of a fresh mHC writes the same to all streams, and nothing is updated here."""
    model = build("transformer_mhc_tiny", dropout=0.0, **TINY)
    log = SkipLog(train_step, model, interval=50)
    run(log, model, (49, 99))
    assert "streams" not in caplog.text
    run(log, model, (149, 199))
    log.writer.close()
    (warning,) = [line for line in caplog.messages if "streams" in line]
    assert warning.startswith(
        "at update 150 the streams of the encoder count as 1.00 of 4: "
        "they are copies of one another, as since the start; the streams of the decoder "
    )


def test_copies_during_the_warm_up_are_not_warned_of(folder, caplog):
    """Its steps are small, and hyper-connections start as copies."""
    model = build("transformer_mhc_tiny", dropout=0.0, **TINY)
    log = SkipLog(train_step, model, interval=50)

    class WarmingUp(Optimizer):
        rate = 0.0

        def get_lr(self):
            self.rate += 1e-6
            return self.rate

    optimizer = WarmingUp()
    for update in (49, 98, 99, 148, 149, 198, 199):
        log(batch(sentences()), model, None, optimizer, update)
    log.writer.close()
    assert "streams" not in caplog.text
