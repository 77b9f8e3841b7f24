"""Admin's profile of a model: when it is taken, of which sentences, and what it leaves alone."""

import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transformer_helpers import TINY, batch, build, sentences, task

from fairseq_rskip.errors import UserError
from fairseq_rskip.modules import profiling
from fairseq_rskip.residual import skips


@pytest.fixture
def in_a_training(monkeypatch):
    """As fairseq-train: it has imported the trainer, which other commands never do."""
    monkeypatch.setitem(sys.modules, "fairseq.trainer", torch)


class Pairs(list):
    """What profiling asks of a training set: sentences, and a collater."""

    def collater(self, samples):
        source, lengths, previous = batch(
            [(s["source"].tolist(), s["target"].tolist()) for s in samples]
        )
        net_input = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": previous}
        return {"net_input": net_input, "target": previous, "ntokens": int(lengths.sum())}


class Training:
    """A task with training ``examples``, or an exception that reading them raises."""

    def __init__(self, examples):
        self.__dict__.update(vars(task()))
        self.examples = examples
        self.datasets = {"valid": "kept"}

    def load_dataset(self, split, **options):
        if isinstance(self.examples, Exception):
            raise self.examples
        self.datasets[split] = Pairs(self.examples)

    def dataset(self, split):
        return self.datasets[split]


def examples():
    pairs = sentences((7, 3, 5))
    return [{"source": torch.tensor(s), "target": torch.tensor(t)} for s, t in pairs]


def admin(**options):
    return build("transformer_admin_tiny", **TINY, **options)


def omegas(model):
    return [float(skip.weight[0].detach()) for skip in skips(model.decoder).values()]


def test_admin_is_profiled_where_a_training_can_follow(in_a_training):
    model = admin()
    profiling.profile(Training(examples()), model)
    first, *others = omegas(model)
    assert first == 1 and others == sorted(others) and others[-1] > others[0] > 1


def test_admin_is_not_profiled_where_no_training_can_follow(monkeypatch):
    monkeypatch.delitem(sys.modules, "fairseq.trainer", raising=False)
    model = admin()
    profiling.profile(Training(examples()), model)
    assert set(omegas(model)) == {1.0}


def test_a_profile_changes_neither_random_numbers_nor_datasets(in_a_training):
    training, model = Training(examples()), admin(dropout=0.3).train()  # as fairseq builds it
    state = torch.get_rng_state()
    profiling.profile(training, model)
    assert torch.equal(torch.get_rng_state(), state)
    assert training.datasets == {"valid": "kept"}


def test_a_profile_leaves_no_layer_out(in_a_training):
    whole = admin(dropout=0.0).train()  # as fairseq builds it: LayerDrop is off in evaluation
    thinned = admin(dropout=0.0, encoder_layerdrop=0.5, decoder_layerdrop=0.5).train()
    thinned.load_state_dict(whole.state_dict())
    for model in (whole, thinned):
        profiling.profile(Training(examples()), model)
    assert omegas(thinned) == pytest.approx(omegas(whole))
    assert thinned.decoder.layers.p == 0.5


TOO_LONG = {"source": torch.full((2000,), 5), "target": torch.tensor([5, 2])}


def test_a_profile_leaves_out_sentences_that_training_leaves_out(in_a_training):
    expected, model = admin(), admin()
    profiling.profile(Training(examples()), expected)
    profiling.profile(Training([TOO_LONG, *examples()]), model)
    assert omegas(model) == omegas(expected)


def test_a_profile_without_a_sentence_that_fits_is_refused(in_a_training):
    with pytest.raises(UserError, match="no training example is within the model's"):
        profiling.profile(Training([TOO_LONG]), admin())


def test_a_model_that_is_loaded_without_training_data_is_not_profiled(in_a_training):
    """As in a notebook that has trained before: the values are in the checkpoint."""
    model = admin()
    profiling.profile(Training(FileNotFoundError("no train.src")), model)
    assert set(omegas(model)) == {1.0}


def test_training_data_that_cannot_be_read_are_one_line(in_a_training):
    with pytest.raises(UserError, match="need the training data.*--skip-omega formula"):
        profiling.profile(Training(KeyError("source")), admin())


def test_a_profile_of_sharded_parameters_is_refused(in_a_training, monkeypatch):
    """fairseq builds a model inside fairscale's context, and flattens it afterwards."""
    wrapping = SimpleNamespace(ConfigAutoWrap=SimpleNamespace(in_autowrap_context=True))
    monkeypatch.setitem(sys.modules, "fairscale.nn.wrap.auto_wrap", wrapping)
    with pytest.raises(UserError, match="admin cannot be profiled under .*fully_sharded"):
        profiling.profile(Training(examples()), admin())


def test_a_profile_reads_the_subset_that_is_trained():
    """Tasks of translation hold --train-subset; others only the group of options beside theirs."""
    config = OmegaConf.create({"task": {"data": "x"}, "dataset": {"train_subset": "train1"}})
    assert profiling.training_subset(SimpleNamespace(cfg=config.task)) == "train1"
    assert profiling.training_subset(SimpleNamespace(args=Namespace(train_subset="a"))) == "a"
    assert profiling.training_subset(SimpleNamespace()) == "train"


def test_a_profile_reads_the_first_sentences(monkeypatch):
    in_two = sum(len(side) for example in examples()[:2] for side in example.values())
    training, model = Training(examples()), admin()
    training.load_dataset("train")
    assert len(profiling.first_batch(training, model)["target"]) == 3
    monkeypatch.setattr(profiling, "TOKENS", in_two)
    assert len(profiling.first_batch(training, model)["target"]) == 2


def test_the_loss_of_a_profile_leaves_padding_out():
    training, model = Training(examples()), admin()
    training.load_dataset("train")
    sample = profiling.first_batch(training, model)
    logits, target = model(**sample["net_input"])[0], sample["target"]
    kept = target.ne(model.decoder.padding_idx)
    assert not kept.all()
    expected = torch.nn.functional.cross_entropy(logits[kept], target[kept])
    torch.testing.assert_close(profiling.token_loss(model, sample), expected)
