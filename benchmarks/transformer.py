"""Measure what a skip connection costs in a Transformer: training and beam search beside fairseq's `transformer`.

Words per second of fairseq's own Trainer (forward, backward, clipping, Adam), sentences per second of beam-4 search in
which every hypothesis has the same length, and the memory that a forward pass keeps for its backward pass. A contender
is stock or RULE[:VALUE], for example xskip_ln:2 or askip_ln:halting; the others are compared with the first.
"""

import copy
import functools
from argparse import Namespace
from typing import Any

import torch
from fairseq import options, tasks, trainer, utils
from fairseq.data import Dictionary, language_pair_dataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import fairseq_rskip.models  # noqa: F401  (registers the architectures)

from . import harness

# name -> embed dim, layers, vocabulary, tokens of a batch
SIZES = {"tiny": (64, 1, 100, 100), "small": (256, 3, 8000, 1500), "base": (512, 6, 32000, 4096)}
TRAINING = "--share-all-embeddings --criterion label_smoothed_cross_entropy --optimizer adam --lr 1e-4 --clip-norm 0.1"
CONTENDERS = ["stock", *(f"rskip_ln:{k}" for k in (1, 2, 3))]


class Contender:
    """One model with its trainer and generator."""

    def __init__(self, name: str, words: Dictionary, args: Namespace):
        dim, layers, *_ = SIZES[args.size]
        rule, _, value = name.partition(":")
        argv = ["none", *TRAINING.split(), "--arch", "transformer" if rule == "stock" else f"transformer_{rule}"]
        argv += ["--skip-lambda" if value[:1].isdigit() else "--skip-adapt", value] if value else []
        sizes = {"embed-dim": dim, "ffn-embed-dim": 4 * dim, "attention-heads": dim // 64, "layers": layers}
        argv += [f"--{side}-{option}={size}" for side in ("encoder", "decoder") for option, size in sizes.items()]
        argv += ["--cpu"] * (args.device == "cpu") + [f"--{args.dtype}"] * (args.dtype != "fp32")
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), argv))
        utils.set_torch_seed(1)
        task = tasks.translation.TranslationTask(cfg.task, words, words)
        self.trainer = trainer.Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
        translator = copy.deepcopy(self.trainer.model).eval()  # fairseq-generate changes the model it decodes with
        translator.prepare_for_inference_(cfg)
        self.generator = task.build_generator([translator], Namespace(beam=4, max_len_b=25, min_len=25))

    def training(self, batches: list[Any]) -> int:
        """One step on each batch; returns the number of target tokens."""
        for batch in batches:
            self.trainer.train_step([batch])
        return sum(batch["ntokens"] for batch in batches)

    def saved(self, batch: Any) -> float:
        """MB that a forward pass keeps for its backward pass, without the weights."""
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(kept.append, kept.pop):
            self.trainer.criterion(self.trainer.model, batch)
        sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.trainer.model.parameters()}
        return round(sum(size for pointer, size in sizes.items() if pointer not in weights) / 1e6, 1)

    def beam_search(self, batches: list[Any]) -> int:
        """Beam search; returns the number of sentences."""
        for batch in batches:
            self.generator.generate([], batch)
        return sum(len(batch["id"]) for batch in batches)


def make_batches(words: Dictionary, tokens: int, device: str) -> list[Any]:
    """Batches of random words: about ``tokens`` target tokens each, in sentences of up to 40 as in a corpus."""
    batches = []
    for longest in (10, 20, 30, 40):
        ids = torch.randint(words.nspecial, len(words), (2, max(1, tokens // longest), longest))
        ids[..., -1] = words.eos()
        lines = [{"id": i, "source": s[i % 5 :], "target": t[i % 4 :]} for i, (s, t) in enumerate(zip(*ids))]
        batches.append(language_pair_dataset.collate(lines, words.pad(), words.eos()))
    return utils.move_to_cuda(batches) if device == "cuda" else batches


def table(args: Namespace) -> list[harness.Row]:
    args.size = "tiny" if args.quick else "base" if args.device == "cuda" else "small"
    words, base, (*_, vocabulary, tokens) = Dictionary(), args.contenders[0], SIZES[args.size]
    words.pad_to_multiple_(vocabulary)
    made = {name: Contender(name, words, args) for name in args.contenders}
    rows = {name: {"model": name, "size": args.size, "tokens": tokens} for name in made}
    longest = make_batches(words, tokens, args.device)[-1]
    for work, unit, count in (("training", "words", tokens), ("beam_search", "sentences", tokens // 2)):
        contenders = {name: getattr(contender, work) for name, contender in made.items()}
        rates = harness.measure(contenders, args, make_batches(words, count, args.device))
        for name, speed in harness.medians(rates, base, f"{unit}_per_s", f"{work}_over_{base}").items():
            rows[name] |= speed
    return [{**row, "saved_MB": made[name].saved(longest)} for name, row in rows.items()]


main = functools.partial(harness.main, table, "train_overhead.csv", 9, __doc__, CONTENDERS)

if __name__ == "__main__":
    raise SystemExit(main())
