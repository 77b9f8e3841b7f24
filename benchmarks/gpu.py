"""Everything that needs a GPU, in parts of at most eight minutes: tests, speeds and trainings (docs/gpu.md).

  python -m benchmarks.gpu                  every part; trainings are resumed until they are done
  python -m benchmarks.gpu operator-fp16    one part, eight minutes at most; a training says whether it is done
  python -m benchmarks.gpu --dry-run        all of it at toy size on a CPU

Results are CSV files in results/gpu, with card, driver and versions in every row.
"""

import argparse
import csv
import json
import shlex
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path

import torch

from fairseq_rskip.console import Parser, print_line, whole_number
from fairseq_rskip.errors import UserError, exit_status

from . import harness

UNFINISHED = 3  # exit status of a training whose time was up
TOY = {
    "translation": "max-update=4 save-interval-updates=2 warmup-updates=2 encoder-layers=1 decoder-layers=1 "
    "encoder-embed-dim=16 decoder-embed-dim=16 encoder-ffn-embed-dim=16 decoder-ffn-embed-dim=16 "
    "encoder-attention-heads=2 decoder-attention-heads=2",
    "images": "depth=8 iterations=2 warmup-iterations=1 milestones=1 batch-size=8 save-interval=1 amp=off device=cpu",
}


def parts(options: argparse.Namespace) -> dict[str, list[str]]:
    """The command of each part."""
    python, out, toy = sys.executable, options.output, options.dry_run
    made = {"tests": [python, "-m", "pytest", "-q", "tests/gpu", f"--junitxml={out / 'tests.xml'}"]}
    shapes = {"operator": [], "transformer": ["--size", "base", "--tokens", "4096"], "resnet": []}
    for name, words in shapes.items():
        for dtype in ("fp32", "fp16", "bf16") if name == "operator" else ("fp16", "bf16"):
            command = [python, "-m", f"benchmarks.{name}", "--csv", str(out / f"{name}_{dtype}.csv")]
            on = ["--device", "cpu", "--dtype", "fp32" if dtype == "fp16" else dtype, "--quick", "--rounds", "1"]
            on += ["--builds", "one"] * (name == "operator")
            made[f"{name}-{dtype}"] = command + (on if toy else ["--device", "cuda", "--dtype", dtype, *words])
    for name, data in (("translation", options.multi30k), ("images", options.cifar10)):
        made[name] = [
            python,
            "scripts/reproduce.py",
            "run",
            f"experiments/gpu-{name}.yaml",
            "--jobs",
            str(options.jobs),
        ]
        made[name] += ["--output", str(out / name), *(["--corpus", str(data)] if data else [])]
        made[name] += ["--seeds", "1", "--no-figures", "--set", *TOY[name].split()] if toy else []
    return made


def run(name: str, command: list[str], options: argparse.Namespace) -> bool:
    """Run a part; returns whether it is done. Raises ``UserError`` if it fails."""
    print_line(f"{name}: {shlex.join(command)}")
    process = subprocess.Popen(command)
    try:
        status = process.wait(60 * options.minutes)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # a training saves and ends
        process.wait()
        if name not in TOY:
            raise UserError(f"{name} takes more than {options.minutes} minutes; give --minutes") from None
        status = 0
        done = False
    else:
        done = True
    if name == "tests":
        suite = next(xml.parse(options.output / "tests.xml").iter("testsuite")).attrib
        counts = {key: suite[key] for key in ("tests", "failures", "errors", "skipped", "time")}
        harness.write(options.output / "tests.csv", [{**counts, **machine(options)}])
    if name in TOY:
        collect(name, options)
    if status:
        raise UserError(f"{name} ended with status {status}; its message is above")
    return done


def collect(name: str, options: argparse.Namespace) -> None:
    """Write what the trainings have given so far, a row for each."""
    rows = []
    for path in sorted((options.output / name / "runs").glob("*/*/run.json")):
        record = json.loads(path.read_text("utf-8"))
        values = (record.get("metrics") or {}).get("values", {})
        about = {"run": path.parts[-3], "seed": path.parts[-2], "state": "done" if values else "not done"}
        rows.append({**about, **values, **machine(options)})
    if rows:
        columns = dict.fromkeys(key for row in rows for key in row)
        harness.write(options.output / f"{name}.csv", [{key: row.get(key, "") for key in columns} for row in rows])


def machine(options: argparse.Namespace) -> dict[str, object]:
    about = argparse.Namespace(device="cpu" if options.dry_run else "cuda", dtype="", threads="", rounds="")
    return {key: value for key, value in harness.machine(about).items() if value != ""}


def make_toys(options: argparse.Namespace, folder: Path) -> None:
    """A corpus of numbers and a data set of digits for the trainings of a dry run."""
    text, options.multi30k, options.cifar10 = folder / "text", folder / "numbers", "digits"
    subprocess.run([sys.executable, "scripts/make_number_corpus.py", str(text), "--train", "300"], check=True)
    for path in text.glob("test.*"):
        path.write_text("".join(path.read_text("utf-8").splitlines(keepends=True)[:20]), encoding="utf-8")
    prepare = ["data-prep/prepare-corpus.sh", "--src", "en", "--tgt", "vi", "--bpe-size", "60"]
    for split in ("train", "valid", "test"):
        prepare += [f"--{split}", str(text / split)]
    subprocess.run([*prepare, str(options.multi30k)], check=True)


def work(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="see --list (default: all)")
    parser.add_argument("--list", action="store_true", help="print the parts with their commands")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, on a CPU, into a temporary folder")
    parser.add_argument(
        "--output", type=Path, default=Path("results/gpu"), metavar="DIR", help="(default: %(default)s)"
    )
    parser.add_argument("--minutes", type=whole_number(1), default=8, metavar="N", help="limit of a part (default: 8)")
    parser.add_argument("--multi30k", metavar="DIR", help="prepared data (default: data/multi30k-en-de)")
    parser.add_argument("--cifar10", metavar="DIR", help="images, or the downloaded archive's folder (default: data/)")
    options = parser.parse_args(argv)
    if not (options.dry_run or options.list or torch.cuda.is_available()):
        raise UserError("torch sees no CUDA device here; --dry-run tries everything on a CPU")
    with tempfile.TemporaryDirectory() as folder:
        if options.dry_run:
            options.output = Path(folder) / "results"
        commands = parts(options)
        if unknown := sorted(set(options.parts) - set(commands)):
            raise UserError(f"there is no part {unknown[0]!r}; expected one of {', '.join(commands)}")
        if options.list:
            for name, command in commands.items():
                print_line(f"{name}: {shlex.join(command)}")
            return 0
        options.output.mkdir(parents=True, exist_ok=True)
        chosen = options.parts or list(commands)
        if options.dry_run and set(chosen) & set(TOY):
            make_toys(options, Path(folder))
            commands = parts(options)
        for name in chosen:
            while not run(name, commands[name], options):
                print_line(f"{name}: {options.minutes} minutes are over; the same command resumes")
                if options.parts:
                    return UNFINISHED
        print_line(f"done: {', '.join(chosen)}; results in {options.output}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(lambda: work(argv))


if __name__ == "__main__":
    sys.exit(main())
