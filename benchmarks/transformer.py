"""Measure what a skip connection costs in a Transformer: training and beam search beside fairseq's `transformer`.

Words per second of fairseq's own Trainer (forward, backward, clipping, Adam), sentences per second of beam-4 search in
which every hypothesis has the same length, and the memory that a forward pass keeps for its backward pass.
"""

import copy
import functools
import random
import statistics
import sys
from argparse import Namespace
from typing import Any

import torch
from fairseq import options, utils
from fairseq.data import Dictionary
from fairseq.data.language_pair_dataset import collate
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer

import fairseq_rskip.models  # noqa: F401  (registers the architectures)

from . import harness

COUNT = 4  # batches of a turn: of the search one takes under a second
# name -> embed dim, ffn dim, heads, layers, vocabulary, tokens of a batch
SIZES = {"tiny": (16, 16, 2, 1, 100, 100), "small": (256, 1024, 4, 3, 8000, 1500)}
SIZES["base"] = (512, 2048, 8, 6, 32000, 4096)
TEXT = "stock or RULE[:VALUE], for example xskip_ln:2 or askip_ln:halting; the others are compared with the first"
DEFAULT = ["stock", *(f"rskip_ln:{k}" for k in (1, 2, 3))]


class Contender:
    """One model with its trainer and generator."""

    def __init__(self, name: str, words: Dictionary, args: Namespace):
        dim, ffn, heads, layers, *_ = map(str, SIZES[args.size])
        rule, _, value = name.partition(":")
        argv = ["none", "--arch", "transformer" if rule == "stock" else f"transformer_{rule}", "--share-all-embeddings"]
        argv += ["--skip-lambda" if value[:1].isdigit() else "--skip-adapt", value] if value else []
        for side in ("--encoder", "--decoder"):
            argv += [f"{side}-embed-dim", dim, f"{side}-ffn-embed-dim", ffn]
            argv += [f"{side}-attention-heads", heads, f"{side}-layers", layers]
        argv += "--criterion label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam".split()
        argv += "--lr 1e-4 --clip-norm 0.1 --max-tokens 4096".split()
        argv += ["--cpu"] * (args.device == "cpu") + [f"--{args.dtype}"] * (args.dtype != "fp32")
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), argv))
        utils.set_torch_seed(1)
        task = TranslationTask(cfg.task, words, words)
        self.model = task.build_model(cfg.model)
        self.trainer = Trainer(cfg, task, self.model, task.build_criterion(cfg.criterion))
        self.trainer.lr_step_begin_epoch(1)
        translator = copy.deepcopy(self.trainer.model).eval()  # fairseq-generate changes the model it decodes with
        translator.prepare_for_inference_(cfg)
        self.generator = task.build_generator([translator], Namespace(beam=4, max_len_b=25, min_len=25))

    def train(self, batches: list[Any]) -> int:
        """One step on each batch; returns the number of target tokens."""
        with metrics.aggregate(new_root=True):
            for batch in batches:
                self.trainer.train_step([batch])
        return sum(batch["ntokens"] for batch in batches)

    def saved(self, batches: list[Any]) -> float:
        """MB of activations that a step's forward pass keeps for its backward pass."""
        kept = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.train(batches[:1])
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        return sum(size for pointer, size in kept.items() if pointer not in weights) / 1e6

    def search(self, batches: list[Any]) -> int:
        """Beam search; returns the number of sentences."""
        for batch in batches:
            self.generator.generate([], batch)
        return sum(len(batch["id"]) for batch in batches)


def make_batches(words: Dictionary, tokens: int, seed: int, device: str) -> list[Any]:
    """Batches of random words: about ``tokens`` target tokens each, lengths of 10 to 40 as in a corpus."""
    draw, batches = random.Random(seed), []
    for _ in range(COUNT):
        length = draw.randint(10, 40)

        def sentence(length: int = length) -> torch.Tensor:
            ids = [draw.randrange(words.nspecial, len(words)) for _ in range(length - draw.randint(0, length // 4) - 1)]
            return torch.tensor([*ids, words.eos()])

        lines = [{"id": i, "source": sentence(), "target": sentence()} for i in range(max(1, tokens // length))]
        batch = collate(lines, words.pad(), words.eos())
        batches.append(utils.move_to_cuda(batch) if device == "cuda" else batch)
    return batches


def table(args: Namespace) -> list[harness.Row]:
    args.size = "tiny" if args.quick else "base" if args.device == "cuda" else "small"
    words, base, (*_, vocabulary, tokens) = Dictionary(), args.contenders[0], SIZES[args.size]
    for number in range(vocabulary - words.nspecial):
        words.add_symbol(f"w{number}")
    made = {name: Contender(name, words, args) for name in args.contenders}

    def measure(method: str, tokens: int, seed: int) -> harness.Rates:
        work = {name: getattr(contender, method) for name, contender in made.items()}
        return harness.measure(work, args, lambda turn: make_batches(words, tokens, seed + turn, args.device))

    saved = {name: contender.saved(make_batches(words, tokens, 0, args.device)) for name, contender in made.items()}
    trained, searched, rows = measure("train", tokens, 0), measure("search", tokens // 2, 1000), []
    for name in made:
        row = {"model": name, "size": args.size, "tokens": tokens}
        row["words_per_s"] = round(statistics.median(trained[name]), 1)
        row[f"training_over_{base}"] = harness.ratio(trained[name], trained[base])
        row["sentences_per_s"] = round(statistics.median(searched[name]), 2)
        row[f"beam_search_over_{base}"] = harness.ratio(searched[name], searched[base])
        rows.append({**row, "saved_MB": round(saved[name], 1)})
    return rows


CONTENDERS = {"nargs": "+", "metavar": "NAME", "default": DEFAULT, "help": TEXT}
main = functools.partial(harness.main, table, "train_overhead.csv", 9, __doc__, contenders=CONTENDERS)

if __name__ == "__main__":
    sys.exit(main())
