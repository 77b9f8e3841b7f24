#!/usr/bin/env python3
"""What --skip-log-interval costs: a Transformer's words and a ResNet-20's images per second with it and without.

Every contender trains the same batches: "off" twice (the second, a control, shows how far equal things differ here),
every 100th update logged, and every update logged. They take turns in every round; with --steps 100 each turn
of "every 100" logs once. A figure is the median over the rounds, a ratio to the first "off" the median of the rounds'
ratios. On a busy machine processor time says more than the clock: both are measured, threads that write included. From
the ratio r of logging every update, logging every 100th costs (1 / r - 1) / 100 of the time: the column cost_100.
"""

import argparse
import csv
import dataclasses
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bench  # noqa: E402
import bench_cifar  # noqa: E402
from fairseq.logging import progress_bar  # noqa: E402

import fairseq_rskip.models  # noqa: E402, F401  (registers the architectures)
from fairseq_rskip.modules import skip_log  # noqa: E402
from fairseq_rskip.vision import distributed  # noqa: E402

INTERVALS = {"off": 0, "off again": 0, "every 100": 100, "every 1": 1}
MODEL = "rskip_ln_lambda2"


class Transformer:
    """bench.py's contender of λ = 2 with a log; a turn counts target tokens."""

    def __init__(self, interval, args, data):
        self.contender = bench.Contender(MODEL, "small", data, "fp32")
        skip_log.attach(self.contender.task, self.contender.model, interval)
        self.tokens = args.tokens

    def batches(self, steps, seed):
        made = bench.make_batches(self.contender.task, min(steps, 20), self.tokens, seed)
        return [made[k % len(made)] for k in range(steps)]

    def turn(self, batches):
        self.contender.train(batches)
        return sum(batch["ntokens"] for batch in batches)


class ResNet:
    """train_cifar.py's loop; a turn counts images."""

    def __init__(self, interval, args, images, group, folder):
        config = bench_cifar.configuration(args, MODEL, bench_cifar.FORMATS[0])
        config = dataclasses.replace(config, skip_log_interval=interval)
        self.loop = bench_cifar.Loop(config, images, group, folder)
        self.size = config.batch_size

    def batches(self, steps, seed):
        return steps

    def turn(self, steps):
        self.loop(steps)
        return steps * self.size


def measure(contenders, args):
    """(by the clock, by processor time): what every contender did per second, in every round."""
    rates = {name: ([], []) for name in contenders}
    for turn in range(-1, args.rounds):  # round -1 warms up
        steps = args.steps if turn >= 0 else 2
        batches = next(iter(contenders.values())).batches(steps, turn)
        for name in random.Random(turn).sample(list(contenders), len(contenders)):
            start = time.perf_counter(), time.process_time()
            count = contenders[name].turn(batches)
            end = time.perf_counter(), time.process_time()
            if turn >= 0:
                for kind in (0, 1):
                    rates[name][kind].append(count / (end[kind] - start[kind]))
        print(f"round {turn + 1} of {args.rounds} done", file=sys.stderr)
    return rates


def logged(name, args):
    """How many updates of the rounds a contender logged; two warm it up."""
    interval = INTERVALS[name]
    return (2 + args.rounds * args.steps) // interval - 2 // interval if interval else 0


def rows(kind, unit, rates, args):
    for name, both in rates.items():
        ratios = [statistics.median(a / b for a, b in zip(values, off)) for values, off in zip(both, rates["off"])]
        yield {
            "measured": kind,
            "log": name,
            "logged_updates": logged(name, args),
            "unit": unit,
            "per_s": round(statistics.median(both[0]), 1),
            "ratio": round(ratios[0], 4),
            "per_cpu_s": round(statistics.median(both[1]), 1),
            "cpu_ratio": round(ratios[1], 4),
            "cost_100": round((1 / ratios[1] - 1) / 100, 5) if name == "every 1" else "",
        }


def table(args):
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        bench.make_data(data, bench.SIZES["small"][4])
        contenders = {name: Transformer(interval, args, data) for name, interval in INTERVALS.items()}
        progress_bar.progress_bar([], log_format="none", tensorboard_logdir=folder)  # as fairseq-train begins an epoch
        found = list(rows("transformer, 3+3 layers of 256", "words", measure(contenders, args), args))
        del contenders
        group = distributed.join("cpu")
        images = bench_cifar.random_images(10_000, group.device)
        contenders = {
            name: ResNet(interval, args, images, group, Path(folder) / name) for name, interval in INTERVALS.items()
        }
        return found + list(rows(f"ResNet-{args.depth}", "images", measure(contenders, args), args))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="updates a turn (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=500, help="target tokens a batch (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=20, help="layers of the ResNet (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="images a batch (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "skip_log_overhead.csv")
    parser.set_defaults(amp="off", compile=False, device="cpu")
    args = parser.parse_args()
    if min(args.rounds, args.steps, args.batch_size) < 1 or args.tokens < 50:
        parser.error("--rounds, --steps and --batch-size must be at least 1, --tokens at least 50")
    return args


def main():
    args = parse()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    found = table(args)
    settings = {"rounds": args.rounds, "steps": args.steps, "tokens": args.tokens, "batch_size": args.batch_size}
    for row in found:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
        row.update(settings, **bench.machine())
    with open(args.output, "w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, found[0])
        writer.writeheader()
        writer.writerows(found)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
