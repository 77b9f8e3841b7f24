"""What --skip-log-interval costs: a Transformer's words and a ResNet-20's images per second with it and without.

Every contender trains the same batches: "off" twice (the second, a control, shows how far equal things differ here),
every 100th update logged, and every update logged. They take turns (benchmark.py); with --steps 100 each turn of "every
100" logs once. On a busy machine processor time says more than the clock: both are measured, threads that write
included. From the ratio r of logging every update, logging every 100th costs (1 / r - 1) / 100 of the time: the column
cost_100.
"""

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fairseq.logging import progress_bar

from ..errors import exit_status
from ..modules import training
from ..vision import distributed
from . import bench_resnet, bench_transformer, benchmark

INTERVALS = {"off": 0, "off again": 0, "every 100": 100, "every 1": 1}
MODEL = "rskip_ln_lambda2"


WARM_UP = 2  # updates


def transformer(interval: int, args: argparse.Namespace, data: Path) -> bench_transformer.Contender:
    """λ = 2 of bench_transformer.py with a log."""
    contender = bench_transformer.Contender(MODEL, "small", data, "fp32")
    training.attach(contender.task, contender.model, interval)
    return contender


def resnet(interval: int, args: argparse.Namespace, images, group, folder: Path) -> bench_resnet.Loop:
    """train_cifar.py's loop with a log."""
    config = bench_resnet.configuration(args, MODEL, bench_resnet.FORMATS[0])
    return bench_resnet.Loop(dataclasses.replace(config, skip_log_interval=interval), images, group, folder)


def logged(name: str, args: argparse.Namespace) -> int:
    """How many updates of the rounds a contender logged."""
    interval = INTERVALS[name]
    return (WARM_UP + args.rounds * args.steps) // interval - WARM_UP // interval if interval else 0


def rows(kind: str, unit: str, rates: dict[str, benchmark.Rates], args: argparse.Namespace) -> Iterator[benchmark.Row]:
    for name, found in rates.items():
        clock, cpu = (benchmark.ratio(values, off) for values, off in zip(found, rates["off"]))
        yield {
            "measured": kind,
            "log": name,
            "logged_updates": logged(name, args),
            "unit": unit,
            "per_s": round(statistics.median(found.clock), 1),
            "ratio": round(clock, 4),
            "per_cpu_s": round(statistics.median(found.cpu), 1),
            "cpu_ratio": round(cpu, 4),
            "cost_100": round((1 / cpu - 1) / 100, 5) if name == "every 1" else "",
        }


def table(args: argparse.Namespace) -> list[benchmark.Row]:
    def steps(turn: int) -> int:
        return args.steps if turn >= 0 else WARM_UP

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        bench_transformer.make_data(data, bench_transformer.SIZES["small"][4])
        contenders = {name: transformer(interval, args, data) for name, interval in INTERVALS.items()}
        progress_bar.progress_bar([], log_format="none", tensorboard_logdir=folder)  # as fairseq-train begins an epoch
        task = contenders["off"].task

        def batches(turn: int) -> list:
            made = bench_transformer.make_batches(task, min(steps(turn), 20), args.tokens, turn)
            return [made[k % len(made)] for k in range(steps(turn))]

        rates = benchmark.measure({name: c.train for name, c in contenders.items()}, args.rounds, batches)
        found = list(rows("transformer, 3+3 layers of 256", "words", rates, args))
        del contenders
        group = distributed.join("cpu")
        images = bench_resnet.random_images(10_000, group.device)
        loops = {name: resnet(n, args, images, group, Path(folder) / name) for name, n in INTERVALS.items()}
        return found + list(rows(f"ResNet-{args.depth}", "images", benchmark.measure(loops, args.rounds, steps), args))


def bench(argv: Sequence[str] | None) -> None:
    parser = benchmark.parser(__doc__, 3, "skip_log_overhead.csv")
    benchmark.add_count(parser, "--steps", 100, "updates a turn")
    benchmark.add_count(parser, "--tokens", 500, "target tokens a batch", least=50)
    benchmark.add_count(parser, "--depth", 20, "layers of the ResNet")
    benchmark.add_count(parser, "--batch-size", 32, "images a batch")
    parser.set_defaults(amp="off", compile=False, device="cpu")
    args = parser.parse_args(argv)
    benchmark.check_output(args.output)
    settings = {"rounds": args.rounds, "steps": args.steps, "tokens": args.tokens, "batch_size": args.batch_size}
    benchmark.report(table(args), {**settings, **benchmark.machine()}, args.output)


def main(argv: Sequence[str] | None = None) -> int:
    return exit_status(lambda: bench(argv))
