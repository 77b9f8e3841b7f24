"""Everything that needs a GPU, in parts of at most eight minutes (docs/gpu.md).

The parts are tests, speeds and trainings.

  python -m benchmarks.gpu                  every part; trainings are resumed until they are done
  python -m benchmarks.gpu operator-fp16    one part; a training that is not done ends with status 3
  python -m benchmarks.gpu --dry-run        all of it at toy size on a CPU

Results are CSV files in results/gpu, with card and versions in every row.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fairseq_rskip.console import Parser, print_line, whole_number
from fairseq_rskip.errors import UserError, exit_status

from . import harness

UNFINISHED = 3
SPEEDS = {  # benchmark -> the dtypes it measures
    "operator": ["fp16", "bf16", "fp32"],
    "transformer": ["fp16", "bf16"],
    "resnet": ["fp16", "bf16"],
}
# as on a CPU, and once with Triton's kernels, which RSKIP_OPS=auto does not choose
TRANSFORMERS = ["stock", "rskip_ln:1", "rskip_ln:2", "RSKIP_OPS=cuda rskip_ln:2", "rskip_ln:3"]


@dataclass(frozen=True)
class Training:
    """A part that trains the rows of experiments/gpu-NAME.yaml.

    ``data`` is the option of this command that names other data; a dry run trains only the cells
    that ``cells`` names, with the options ``toy``.
    """

    data: str
    cells: Sequence[str]
    toy: Sequence[str]


TRAININGS = {
    "translation": Training(
        data="multi30k",
        cells=["--rows", "post-norm", "pre-norm"],
        toy=[
            "max-update=4",
            "save-interval-updates=2",
            "warmup-updates=2",
            "encoder-layers=1",
            "decoder-layers=1",
            "encoder-embed-dim=16",
            "decoder-embed-dim=16",
            "encoder-ffn-embed-dim=16",
            "decoder-ffn-embed-dim=16",
            "encoder-attention-heads=2",
            "decoder-attention-heads=2",
        ],
    ),
    "images": Training(
        data="cifar10",
        cells=["--rows", "1xSkip", "2rSkip+LN"],
        toy=[
            "depth=8",
            "iterations=3",
            "warmup-iterations=1",
            "milestones=2",
            "batch-size=8",
            "save-interval=1",
            "device=cpu",
        ],
    ),
    "depthbench": Training(
        data="wikitext",
        cells=["--rows", "pre-norm", "fixed angle", "--columns", "6 layers"],
        toy=[
            "max-update=4",
            "save-interval-updates=2",
            "warmup-updates=2",
            "tokens-per-sample=32",
            "max-tokens=64",
        ],
    ),
}


def parts(options: argparse.Namespace) -> dict[str, list[str]]:
    """The command line of each part, by its name."""
    modules = {"tests": tests_command(options)}
    for benchmark, dtypes in SPEEDS.items():
        for dtype in dtypes:
            modules[f"{benchmark}-{dtype}"] = speed_command(benchmark, dtype, options)
    for name in TRAININGS:
        modules[name] = training_command(name, options)
    return {name: [sys.executable, "-m", *words] for name, words in modules.items()}


def tests_command(options: argparse.Namespace) -> list[str]:
    words = ["pytest", "-q", "tests/gpu", f"--junitxml={options.output / 'tests.xml'}"]
    if options.dry_run:
        words += ["-k", "rskip_ln_tiny or short_20 or augmentation"]
    return words


def speed_command(benchmark: str, dtype: str, options: argparse.Namespace) -> list[str]:
    table = options.output / f"{benchmark}_{dtype}.csv"
    words = [f"benchmarks.{benchmark}", "--csv", str(table)]
    if benchmark == "transformer":
        words += ["--contenders", *TRANSFORMERS]
    if options.dry_run:
        dtype = "fp32" if dtype == "fp16" else dtype  # fp16 is not for CPUs
        return [*words, "--device", "cpu", "--dtype", dtype, "--quick", "--rounds", "1"]
    return [*words, "--device", "cuda", "--dtype", dtype]


def training_command(name: str, options: argparse.Namespace) -> list[str]:
    training = TRAININGS[name]
    folder = options.output / name
    words = ["fairseq_rskip.tools", "run", f"experiments/gpu-{name}.yaml", "--output", str(folder)]
    data = getattr(options, training.data)
    if data:
        words += ["--corpus", str(data)]
    if options.dry_run:
        words += [*training.cells, "--seeds", "1", "--no-figures", "--set", *training.toy]
    return words


def run(name: str, command: list[str], options: argparse.Namespace) -> bool:
    """Run a part; returns whether it is done. Raises ``UserError`` if it fails."""
    print_line(f"{name}: {shlex.join(command)}")
    environment = dict(os.environ)
    if options.dry_run:
        environment["RSKIP_TEST_DEVICE"] = "cpu"
    process = subprocess.Popen(command, env=environment)
    done = True
    try:
        status = process.wait(60 * options.minutes)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # a training saves and ends
        status, done = process.wait(), False
    except KeyboardInterrupt:
        process.wait()
        raise
    finally:
        collect(name, options)
    if done and status:
        raise UserError(f"{name} ended with status {status}; its message is above")
    if done and not (options.output / f"{name.replace('-', '_')}.csv").exists():
        raise UserError(f"{name} has written no table")
    if not done and name not in TRAININGS:
        raise UserError(f"{name} takes more than {options.minutes} minutes; give --minutes")
    return done


def collect(name: str, options: argparse.Namespace) -> None:
    """Write the part's table: the counts of its tests, or a row of results for each training."""
    made: list[harness.Row] = []
    if name == "tests" and (path := options.output / "tests.xml").exists():
        suite = next(xml.parse(path).iter("testsuite")).attrib
        made = [{key: suite[key] for key in ("tests", "failures", "errors", "skipped", "time")}]
    for path in sorted((options.output / name / "runs").glob("*/*/run.json")):
        metrics = json.loads(path.read_text("utf-8")).get("metrics") or {}
        named = {
            "run": path.parts[-3],
            "seed": path.parts[-2],
            "seconds": metrics.get("seconds", ""),
        }
        made.append({**named, **metrics.get("values", {})})
    if made:
        machine = harness.machine("cpu" if options.dry_run else "cuda")
        about = {key: machine[key] for key in ("device", "python", "torch")}
        harness.write(options.output / f"{name}.csv", [{**row, **about} for row in made])


def make_toys(options: argparse.Namespace, folder: Path) -> None:
    """Make the data of a dry run: spelled-out numbers, to translate and as a text."""
    numbers = folder / "text"
    python("scripts/make_number_corpus.py", numbers, "--train", "300")
    for path in numbers.glob("test.*"):
        lines = path.read_text("utf-8").splitlines(keepends=True)
        path.write_text("".join(lines[:20]), encoding="utf-8")

    options.multi30k = folder / "pairs"
    words: list[str | Path] = ["--bpe-size", "100"]
    for side, language in (("src", "en"), ("tgt", "vi")):
        words += [f"--{side}", language]
        for split in ("train", "valid", "test"):
            words += [f"--{split}-{side}", numbers / f"{split}.{language}"]
    python("-m", "fairseq_rskip.tools", "prepare", *words, options.multi30k)

    options.wikitext = folder / "lines"
    words = ["--text", numbers / "train.en", "--lines", "10", "--bpe-size", "100"]
    python("-m", "fairseq_rskip.tools", "prepare", *words, options.wikitext)

    options.cifar10 = "digits"


def python(*words: str | Path) -> None:
    """Run this Python with ``words``. Raises ``UserError`` if it fails."""
    status = subprocess.run([sys.executable, *map(str, words)]).returncode
    if status:
        raise UserError(f"{' '.join(map(str, words))} ended with status {status}, see above")


def work(options: argparse.Namespace, folder: Path) -> int:
    if not (options.dry_run or options.list or torch.cuda.is_available()):
        raise UserError("torch sees no CUDA device here; --dry-run tries everything on a CPU")
    chosen = options.parts or list(parts(options))
    if unknown := sorted(set(chosen) - set(parts(options))):
        raise UserError(
            f"there is no part {unknown[0]!r}; expected some of {', '.join(parts(options))}"
        )
    if options.dry_run and not options.list:
        options.output = folder / "results"
        if not TRAININGS.keys().isdisjoint(chosen):
            make_toys(options, folder)
    options.output.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        command = parts(options)[name]
        if options.list:
            print_line(f"{name}: {shlex.join(command)}")
            continue
        while not run(name, command, options):
            print_line(f"{name}: {options.minutes} minutes are over; the same command resumes")
            if options.parts:
                return UNFINISHED
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    def measure() -> int | None:
        options = parse(argv)
        with tempfile.TemporaryDirectory() as folder:
            return work(options, Path(folder))

    return exit_status(measure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options. Raises ``UsageError``."""
    parser = Parser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="(default: all)")
    parser.add_argument("--list", action="store_true", help="print the parts with their commands")
    parser.add_argument(
        "--dry-run", action="store_true", help="toy sizes, on a CPU, into a temporary folder"
    )
    parser.add_argument(
        "--output", type=Path, default="results/gpu", metavar="DIR", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--minutes",
        type=whole_number(1),
        default=8,
        metavar="N",
        help="limit of a part (default: 8)",
    )
    parser.add_argument(
        "--multi30k", metavar="DIR", help="prepared text (default: data/multi30k-en-de)"
    )
    parser.add_argument(
        "--wikitext",
        default="data/wikitext103-8k",
        metavar="DIR",
        help="prepared text (default: %(default)s)",
    )
    parser.add_argument(
        "--cifar10", metavar="DIR", help="folder of images (default: torchvision's cifar10)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
