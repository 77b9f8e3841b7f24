"""Measure what a skip connection costs in a Transformer: training and beam search beside fairseq's `transformer`.

Words per second of fairseq's own Trainer (forward, backward, clipping, Adam), sentences per second of beam-4 search in
which every hypothesis has the same length, and the memory that a forward pass keeps for its backward pass.
"""

import argparse
import copy
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import options, tasks, utils
from fairseq.data import Dictionary, LanguagePairDataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.trainer import Trainer

import fairseq_rskip.models  # noqa: F401  (registers the architectures)

from . import harness

GENERATIONS = 4  # batches of a turn: one takes under a second
# name -> embed dim, ffn dim, heads, layers, vocabulary
SIZES = {"tiny": (16, 16, 2, 1, 100), "small": (256, 1024, 4, 3, 8000), "base": (512, 2048, 8, 6, 32000)}


class Contender:
    """One model with its trainer and generator."""

    def __init__(self, name: str, data: str, args: argparse.Namespace):
        dim, ffn, heads, layers, _ = SIZES[args.size]
        rule, _, value = name.partition(":")
        argv = [data, "--arch", "transformer" if rule == "stock" else f"transformer_{rule}", "--share-all-embeddings"]
        argv += ["--skip-lambda" if value[:1].isdigit() else "--skip-adapt", value] if value else []
        for side in ("encoder", "decoder"):
            argv += [f"--{side}-embed-dim", str(dim), f"--{side}-ffn-embed-dim", str(ffn)]
            argv += [f"--{side}-attention-heads", str(heads), f"--{side}-layers", str(layers)]
        argv += "--criterion label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam".split()
        argv += "--lr 1e-4 --clip-norm 0.1 --max-tokens 4096".split()
        argv += ["--cpu"] * (args.device == "cpu") + [f"--{args.dtype}"] * (args.dtype != "fp32")
        self.cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), argv))
        utils.set_torch_seed(1)
        self.task = tasks.setup_task(self.cfg.task)
        self.model = self.task.build_model(self.cfg.model)
        self.trainer = Trainer(self.cfg, self.task, self.model, self.task.build_criterion(self.cfg.criterion))
        self.trainer.lr_step_begin_epoch(1)
        argv = [data, "--beam", "4", "--path", "-", "--max-len-a", "0", "--max-len-b", "25", "--min-len", "25"]
        generation = options.parse_args_and_arch(options.get_generation_parser(), argv)
        self.generation = convert_namespace_to_omegaconf(generation).generation
        self.translator = self.generator = None

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

    def generate(self, batches: list[Any]) -> int:
        """Beam search; returns the number of sentences."""
        if self.generator is None:
            self.translator = copy.deepcopy(self.model).eval()  # fairseq-generate changes the model it decodes with
            self.translator.prepare_for_inference_(self.cfg)
            self.generator = self.task.build_generator([self.translator], self.generation)
        for batch in batches:
            moved = utils.move_to_cuda(batch) if next(self.translator.parameters()).is_cuda else batch
            self.task.inference_step(self.generator, [self.translator], moved)
        return sum(len(batch["id"]) for batch in batches)


def make_data(folder: str, vocabulary: int) -> None:
    """Write the dictionaries that fairseq's translation task asks for."""
    for language in ("de", "en"):
        words = "".join(f"w{i} 1\n" for i in range(vocabulary - Dictionary().nspecial))
        (Path(folder) / f"dict.{language}.txt").write_text(words)
    (Path(folder) / "train.en-de.en.idx").touch()  # names the language pair


def make_batches(words: Dictionary, count: int, tokens: int, seed: int) -> list[Any]:
    """Batches of random words: about ``tokens`` target tokens each, lengths of 10 to 40 as in a corpus."""
    draw, batches = random.Random(seed), []
    for _ in range(count):
        length = draw.randint(10, 40)
        lengths = [[length - draw.randint(0, length // 4) for _ in "st"] for _ in range(max(1, tokens // length))]
        ids = [[[draw.randrange(words.nspecial, len(words)) for _ in range(n - 1)] for n in pair] for pair in lengths]
        sides = zip(*([torch.tensor([*line, words.eos()]) for line in pair] for pair in ids))
        (source, sizes), (target, to) = ((side, [len(line) for line in side]) for side in sides)
        data = LanguagePairDataset(source, sizes, words, target, to, words)
        batches.append(data.collater([data[i] for i in range(len(data))]))
    return batches


def table(args: argparse.Namespace) -> list[harness.Row]:
    args.size, args.steps, args.tokens = ("tiny", 1, 100) if args.quick else (args.size, args.steps, args.tokens)
    with tempfile.TemporaryDirectory() as data:
        make_data(data, SIZES[args.size][4])
        made = {name: Contender(name, data, args) for name in args.contenders}
    words = made[args.contenders[0]].task.source_dictionary

    def measure(method: str, count: int, tokens: int, seed: int) -> harness.Rates:
        work = {name: getattr(contender, method) for name, contender in made.items()}
        return harness.measure(work, args, lambda turn: make_batches(words, count, tokens, seed + turn))

    saved = {name: contender.saved(make_batches(words, 1, args.tokens, 0)) for name, contender in made.items()}
    trained = measure("train", args.steps, args.tokens, 0)
    sentences = measure("generate", GENERATIONS, args.tokens // 2, 1000)
    base, sizes = args.contenders[0], {"size": args.size, "tokens": args.tokens}
    rows = []
    for name in args.contenders:
        speed, over = round(statistics.median(trained[name]), 1), harness.ratio(trained[name], trained[base])
        made = {"model": name, **sizes, "words_per_s": speed, f"training_over_{base}": over}
        speed, over = round(statistics.median(sentences[name]), 2), harness.ratio(sentences[name], sentences[base])
        made |= {"sentences_per_s": speed, f"beam_search_over_{base}": over, "saved_MB": round(saved[name], 1)}
        rows.append(made)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    text = "stock or RULE[:VALUE], for example xskip_ln:2 or askip_ln:halting; the others are compared with the first"
    default = ["stock", *(f"rskip_ln:{k}" for k in (1, 2, 3))]
    contenders = {"nargs": "+", "metavar": "NAME", "default": default, "help": text}
    size, numbers = {"choices": SIZES, "default": "small"}, {"steps": 4, "tokens": 1500}
    return harness.main(argv, table, "train_overhead.csv", 9, __doc__, size=size, **numbers, contenders=contenders)


if __name__ == "__main__":
    sys.exit(main())
