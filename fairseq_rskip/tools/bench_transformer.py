"""Cost of the skip connection: rskip_ln λ = 1, 2, 3 (or --contenders) against stock fairseq's `transformer` of the same
sizes.

Training words per second of the clock, and (cpu) of processor time: fairseq's own Trainer, with forward, backward,
gradient clipping, Adam; bytes of model, gradients and optimizer state, peak memory of a process, checkpoint size, and
sentences per second of beam-4 generation. All contenders get the same batches and take turns (benchmark.py).
"""

import argparse
import copy
import multiprocessing
import random
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from fairseq import options, tasks, utils
from fairseq.data import Dictionary, LanguagePairDataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.trainer import Trainer

import fairseq_rskip.models  # noqa: F401  (registers the architectures)

from ..errors import UserError, exit_status
from . import benchmark

ADAPTIVE = ("fraction", "mixture", "halting")  # a frozen gradient λ is rskip's
CONTENDERS = {
    "stock": ["--arch", "transformer"],
    "rskip_ln_lambda1": ["--arch", "transformer_rskip_ln", "--skip-lambda", "1"],
    "rskip_ln_lambda2": ["--arch", "transformer_rskip_ln", "--skip-lambda", "2"],
    "rskip_ln_lambda3": ["--arch", "transformer_rskip_ln", "--skip-lambda", "3"],
    "rskip_ln_lambda4": ["--arch", "transformer_rskip_ln", "--skip-lambda", "4"],
    **{f"askip_ln_{mode}": ["--arch", "transformer_askip_ln", "--skip-adapt", mode] for mode in ADAPTIVE},
}
GENERATIONS = 4  # turns of beam search for each of training: one takes under a second
# name -> embed dim, ffn dim, heads, layers, vocabulary
SIZES = {"small": (256, 1024, 4, 3, 8000), "base": (512, 2048, 8, 6, 32000)}


class Contender:
    """One model with its trainer and generator, on its own thread of random numbers."""

    def __init__(self, name, size, data, precision):
        dim, ffn, heads, layers, _ = SIZES[size]
        argv = [str(data), *CONTENDERS[name], "--share-all-embeddings"]
        for side in ("encoder", "decoder"):
            argv += [f"--{side}-embed-dim", str(dim), f"--{side}-ffn-embed-dim", str(ffn)]
            argv += [f"--{side}-attention-heads", str(heads), f"--{side}-layers", str(layers)]
        argv += "--criterion label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam".split()
        argv += "--lr 1e-4 --clip-norm 0.1 --max-tokens 4096".split()
        argv += {"fp32": [] if torch.cuda.is_available() else ["--cpu"], "fp16": ["--fp16"]}[precision]
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), argv))
        self.name, self.cfg = name, cfg
        utils.set_torch_seed(1)
        self.task = tasks.setup_task(cfg.task)
        self.model = self.task.build_model(cfg.model)
        self.trainer = Trainer(cfg, self.task, self.model, self.task.build_criterion(cfg.criterion))
        self.trainer.lr_step_begin_epoch(1)
        argv = [str(data), "--beam", "4", "--path", "-"]
        generation = options.parse_args_and_arch(options.get_generation_parser(), argv)
        self.generator = self.translator = None
        self.generation_cfg = convert_namespace_to_omegaconf(generation).generation

    def train(self, batches: list[Any]) -> int:
        """One step on each batch; returns their words (target tokens)."""
        with metrics.aggregate(new_root=True):
            for batch in batches:
                self.trainer.train_step([batch])
        return sum(b["ntokens"] for b in batches)

    def generate(self, batches: list[Any], max_len: int = 25) -> int:
        """Beam search; every hypothesis is ``max_len`` long, so all do the same work. Returns the sentences."""
        if self.generator is None:
            self.generation_cfg.max_len_a, self.generation_cfg.max_len_b = 0, max_len
            self.generation_cfg.min_len = max_len
            self.translator = copy.deepcopy(self.model).eval()  # what fairseq-generate prepares trains no more
            self.translator.prepare_for_inference_(self.cfg)
            self.generator = self.task.build_generator([self.translator], self.generation_cfg)
        for batch in batches:
            moved = utils.move_to_cuda(batch) if torch.cuda.is_available() else batch
            self.task.inference_step(self.generator, [self.translator], moved)
        return sum(len(b["id"]) for b in batches)

    def state_bytes(self):
        """Bytes of parameters, gradients and optimizer state after a step."""
        state = self.trainer.optimizer.optimizer.state
        tensors = [t for s in state.values() for t in s.values() if torch.is_tensor(t)]
        tensors += [t for p in self.model.parameters() for t in (p, p.grad) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def checkpoint_bytes(self, folder):
        path = Path(folder) / f"{self.name}.pt"
        self.trainer.consolidate_optimizer()
        self.trainer.save_checkpoint(str(path), {})
        return path.stat().st_size


def make_data(folder, vocabulary):
    """The dictionaries that fairseq's translation task asks for."""
    words = Dictionary()
    for i in range(vocabulary - words.nspecial):
        words.add_symbol(f"w{i}")
    for language in ("de", "en"):
        words.save(str(Path(folder) / f"dict.{language}.txt"))
    (Path(folder) / "train.en-de.en.idx").touch()  # names the language pair
    return words


def make_batches(task, count, tokens, seed):
    """Batches of random words: about ``tokens`` target tokens each, lengths of 10 to 40 like a real corpus."""
    draw = random.Random(seed)
    words, batches = task.source_dictionary, []
    for _ in range(count):
        length = draw.randint(10, 40)
        pairs = []
        for _ in range(max(1, tokens // length)):
            sides = [max(2, length - draw.randint(0, length // 4)) for _ in range(2)]
            ids = [[draw.randrange(words.nspecial, len(words)) for _ in range(n - 1)] for n in sides]
            pairs.append([torch.tensor([*line, words.eos()]) for line in ids])
        sources, targets = zip(*pairs)
        data = LanguagePairDataset(
            sources, [len(s) for s in sources], words, targets, [len(t) for t in targets], words, left_pad_source=True
        )
        batches.append(data.collater([data[i] for i in range(len(data))]))
    return batches


def peaks(args: argparse.Namespace) -> dict[str, list[int]]:
    """Peak bytes of every contender, in up to three rounds, taking turns, each in a process of its own."""
    found: dict[str, list[int]] = {name: [] for name in args.contenders}
    for turn in range(min(args.rounds, 3)):  # they hardly vary
        for name in random.Random(turn).sample(args.contenders, len(args.contenders)):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                found[name].append(pool.submit(peak_memory, name, args.size, args.tokens, args.precision).result())
    return found


def peak_memory(name: str, size: str, tokens: int, precision: str) -> int:
    """Peak resident (GPU: allocated) bytes of this process, which builds one contender and trains it for two steps: the
    peak is there once Adam has its state."""
    with tempfile.TemporaryDirectory() as data:
        make_data(data, SIZES[size][4])
        contender = Contender(name, size, data, precision)
        contender.train(make_batches(contender.task, 2, tokens, seed=0))
    # not getrusage: a child's ru_maxrss starts at what its parent held when it was forked
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else int(resident.split()[1]) * 1024


def table(args: argparse.Namespace) -> list[benchmark.Row]:
    """One row a contender."""
    with tempfile.TemporaryDirectory() as data:
        make_data(data, SIZES[args.size][4])
        contenders = [Contender(name, args.size, data, args.precision) for name in args.contenders]
        task = contenders[0].task
        words = benchmark.measure(
            {c.name: c.train for c in contenders},
            args.rounds,
            lambda turn: make_batches(task, args.steps, args.tokens, seed=turn),
        )
        sentences = benchmark.measure(
            {c.name: c.generate for c in contenders},
            args.rounds * GENERATIONS,
            lambda turn: make_batches(task, 1, args.tokens // 2, seed=1000 + turn),
        )
        memory, base = peaks(args), args.contenders[0]
        rows = [
            {
                "model": c.name,
                "size": args.size,
                "precision": args.precision,
                "train_words_per_s": round(statistics.median(words[c.name].clock), 1),
                f"train_vs_{base}": round(benchmark.ratio(words[c.name].clock, words[base].clock), 4),
                f"train_cpu_vs_{base}": round(benchmark.ratio(words[c.name].cpu, words[base].cpu), 4),
                "generate_sentences_per_s": round(statistics.median(sentences[c.name].clock), 2),
                f"generate_vs_{base}": round(benchmark.ratio(sentences[c.name].clock, sentences[base].clock), 4),
                "state_MB": round(c.state_bytes() / 1e6, 2),
                "peak_MB": round(statistics.median(memory[c.name]) / 1e6, 1),
                "checkpoint_MB": round(c.checkpoint_bytes(data) / 1e6, 2),
            }
            for c in contenders
        ]
    for row in rows:
        for column in ("state_MB", "peak_MB", "checkpoint_MB"):
            row[column.replace("MB", f"vs_{base}")] = round(row[column] / rows[0][column], 4)
    return rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark.parser(__doc__, 7, "train_overhead.csv")
    parser.add_argument("--size", choices=SIZES, default="small", help="model sizes (default: %(default)s)")
    parser.add_argument("--precision", choices=["fp32", "fp16"], default="fp32", help="fp16 needs a GPU")
    benchmark.add_count(parser, "--steps", 4, "training steps a turn")
    benchmark.add_count(parser, "--tokens", 1500, "target tokens a batch", least=50)
    help_text = "the first is what the others are compared with (default: stock and rskip_ln λ = 1, 2, 3)"
    names = {"choices": CONTENDERS, "metavar": "NAME", "default": list(CONTENDERS)[:4]}
    parser.add_argument("--contenders", nargs="+", **names, help=f"{help_text}, of {', '.join(CONTENDERS)}")
    args = parser.parse_args(argv)
    if args.precision == "fp16" and not torch.cuda.is_available():
        raise UserError("--precision fp16 needs a GPU: expected fp32")
    return args


def bench(argv: Sequence[str] | None) -> None:
    args = parse(argv)
    benchmark.check_output(args.output)
    rows = table(args)
    settings = {"rounds": args.rounds, "steps": args.steps, "tokens": args.tokens, **benchmark.machine()}
    benchmark.report(rows, settings, args.output)


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(lambda: bench(argv))
