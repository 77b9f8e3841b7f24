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
from fairseq_rskip.errors import exit_status

from . import harness

GENERATIONS = 4  # batches of a turn: one takes under a second
# name -> embed dim, ffn dim, heads, layers, vocabulary
SIZES = {"tiny": (16, 16, 2, 1, 100), "small": (256, 1024, 4, 3, 8000), "base": (512, 2048, 8, 6, 32000)}


def architecture(contender: str) -> list[str]:
    """fairseq's options for ``stock`` or ``RULE[:VALUE]``, VALUE being λ or how askip adapts it."""
    if contender == "stock":
        return ["--arch", "transformer"]
    rule, _, value = contender.partition(":")
    option = "--skip-lambda" if value[:1].isdigit() else "--skip-adapt"
    return ["--arch", f"transformer_{rule}", *([option, value] if value else [])]


class Contender:
    """One model with its trainer and generator."""

    def __init__(self, name: str, data: str, args: argparse.Namespace):
        dim, ffn, heads, layers, _ = SIZES[args.size]
        argv = [data, *architecture(name), "--share-all-embeddings"]
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
    words = Dictionary()
    for i in range(vocabulary - words.nspecial):
        words.add_symbol(f"w{i}")
    for language in ("de", "en"):
        words.save(str(Path(folder) / f"dict.{language}.txt"))
    (Path(folder) / "train.en-de.en.idx").touch()  # names the language pair


def make_batches(task: Any, count: int, tokens: int, seed: int) -> list[Any]:
    """Batches of random words: about ``tokens`` target tokens each, lengths of 10 to 40 as in a corpus."""
    draw = random.Random(seed)
    words, batches = task.source_dictionary, []
    for _ in range(count):
        length = draw.randint(10, 40)
        lengths = [[length - draw.randint(0, length // 4) for _ in "st"] for _ in range(max(1, tokens // length))]
        ids = [[[draw.randrange(words.nspecial, len(words)) for _ in range(n - 1)] for n in pair] for pair in lengths]
        sources, targets = zip(*([torch.tensor([*line, words.eos()]) for line in pair] for pair in ids))
        data = LanguagePairDataset(
            sources, [len(s) for s in sources], words, targets, [len(t) for t in targets], words, left_pad_source=True
        )
        batches.append(data.collater([data[i] for i in range(len(data))]))
    return batches


def table(args: argparse.Namespace) -> list[harness.Row]:
    with tempfile.TemporaryDirectory() as data:
        make_data(data, SIZES[args.size][4])
        made = {name: Contender(name, data, args) for name in args.contenders}
    task = made[args.contenders[0]].task

    def measure(method: str, count: int, tokens: int, seed: int) -> dict[str, list[float]]:
        work = {name: getattr(contender, method) for name, contender in made.items()}
        return harness.measure(work, args, lambda turn: make_batches(task, count, tokens, seed + turn))

    saved = {name: contender.saved(make_batches(task, 1, args.tokens, 0)) for name, contender in made.items()}
    words = measure("train", args.steps, args.tokens, 0)
    sentences = measure("generate", GENERATIONS, args.tokens // 2, 1000)
    base, sizes = args.contenders[0], {"size": args.size, "tokens": args.tokens}
    return [
        {
            "model": name,
            **sizes,
            "words_per_s": round(statistics.median(words[name]), 1),
            f"training_over_{base}": harness.ratio(words[name], words[base]),
            "sentences_per_s": round(statistics.median(sentences[name]), 2),
            f"beam_search_over_{base}": harness.ratio(sentences[name], sentences[base]),
            "saved_MB": round(saved[name], 1),
        }
        for name in args.contenders
    ]


def bench(argv: Sequence[str] | None) -> None:
    parser = harness.parser(__doc__, "train_overhead.csv", 9)
    parser.add_argument("--size", choices=SIZES, default="small", help="model sizes (default: %(default)s)")
    harness.add_count(parser, "--steps", 4, "training steps a turn")
    harness.add_count(parser, "--tokens", 1500, "target tokens a batch")
    names = ["stock", *(f"rskip_ln:{k}" for k in (1, 2, 3))]
    text = "stock or RULE[:VALUE], for example xskip_ln:2 or askip_ln:halting; the others are compared with the first"
    parser.add_argument("--contenders", nargs="+", metavar="NAME", default=names, help=text)
    args = parser.parse_args(argv)
    if args.quick:
        args.size, args.steps, args.tokens = "tiny", 1, 100
    harness.prepare(args)
    harness.report(table(args), args)


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(lambda: bench(argv))


if __name__ == "__main__":
    sys.exit(main())
