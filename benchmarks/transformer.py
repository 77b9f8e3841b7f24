"""Cost of a skip connection in a Transformer: training and beam search beside stock fairseq's `transformer`.

Words per second of fairseq's own Trainer (forward, backward, clipping, Adam), sentences per second of beam-4 search in
which every hypothesis has the same length, and peak memory of a process that trains one model.
"""

import argparse
import copy
import random
import statistics
import subprocess
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
from fairseq_rskip.console import print_line
from fairseq_rskip.errors import exit_status

from . import harness

GENERATIONS = 4  # turns of beam search for each of training: one takes under a second
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


def peak_memory(args: argparse.Namespace) -> float:
    """Peak MB of this process (GPU: allocated), which trains one contender for two steps."""
    with tempfile.TemporaryDirectory() as data:
        make_data(data, SIZES[args.size][4])
        contender = Contender(args.contenders[0], data, args)
        contender.train(make_batches(contender.task, 2, args.tokens, seed=0))
    if args.device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e3


def peak_in_its_own_process(name: str, args: argparse.Namespace) -> float:
    command = [sys.executable, "-m", "benchmarks.transformer", "--memory-only", "--contenders", name]
    for option in ("device", "dtype", "threads", "size", "tokens"):
        command += [f"--{option}", str(getattr(args, option))]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def table(args: argparse.Namespace) -> list[harness.Row]:
    with tempfile.TemporaryDirectory() as data:
        make_data(data, SIZES[args.size][4])
        made = {name: Contender(name, data, args) for name in args.contenders}
        task = next(iter(made.values())).task
        training = {name: contender.train for name, contender in made.items()}
        words = harness.measure(training, args, lambda turn: make_batches(task, args.steps, args.tokens, turn))
        args.rounds *= GENERATIONS
        search = {name: contender.generate for name, contender in made.items()}
        sentences = harness.measure(search, args, lambda turn: make_batches(task, 1, args.tokens // 2, 1000 + turn))
        args.rounds //= GENERATIONS
    base = args.contenders[0]
    memory = {name: peak_in_its_own_process(name, args) for name in args.contenders}
    return [
        {
            "model": name,
            "size": args.size,
            "tokens": args.tokens,
            "words_per_s": round(statistics.median(words[name]), 1),
            f"training_over_{base}": harness.ratio(words[name], words[base]),
            "sentences_per_s": round(statistics.median(sentences[name]), 2),
            f"beam_search_over_{base}": harness.ratio(sentences[name], sentences[base]),
            "peak_MB": round(memory[name], 1),
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
    parser.add_argument("--memory-only", action="store_true", help="print the peak memory of the first, in MB")
    args = parser.parse_args(argv)
    if args.quick:
        args.size, args.steps, args.tokens = "tiny", 1, 100
    harness.prepare(args)
    if args.memory_only:
        print_line(str(peak_memory(args)))
    else:
        harness.report(table(args), args)


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(lambda: bench(argv))


if __name__ == "__main__":
    sys.exit(main())
