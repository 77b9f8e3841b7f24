#!/usr/bin/env python3
"""Draw the learning curves (training loss, test error) of runs of train_cifar.py into one figure.

    plot_runs.py runs/cifar10-resnet20-* --output curves.png

A run is the folder that --output of train_cifar.py named, or one seed in it; all seeds of a run share a colour.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Dict, List, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fairseq_rskip.safe_load import UserError  # noqa: E402
from fairseq_rskip.vision.logs import LOG  # noqa: E402

PANELS = (("train_loss", "training loss"), ("test_error", "test error (%)"))
FORMATS = (".png", ".pdf", ".svg")


def read_log(path: Path) -> List[Dict]:
    """The records of one log, none if no epoch is done; a last line that a kill cut off is left out.

    Raises ``UserError``.
    """
    records = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a log of train_cifar.py: it is not text") from None
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            float(record["iteration"]), float(record["train_loss"]), float(record.get("test_error", 0))
        except (ValueError, KeyError, TypeError, AttributeError):
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number}, is not a record of train_cifar.py") from None
        records.append(record)
    return records


def seeds_of(run: Path) -> List[List[Dict]]:
    """The logs of a run's seeds, or the one of a seed's own folder, as far as an epoch is done.

    Raises ``UserError`` if there is none.
    """
    logs = [run / LOG] if (run / LOG).is_file() else sorted(run.glob(f"seed*/{LOG}"))
    if not logs:
        raise UserError(f"{run} holds no {LOG}: expected a folder that train_cifar.py wrote")
    found = [(log, read_log(log)) for log in logs]
    for log, records in found:
        if not records:
            print(f"warning: {log} holds no epoch yet and is left out", file=sys.stderr)
    return [records for _, records in found if records]


def draw(runs: Dict[str, List[List[Dict]]], output: Path, first: int) -> None:
    """One line a seed, one colour a run, one panel a quantity, from iteration ``first`` on."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("plot_runs.py needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(11, 4), constrained_layout=True)
    for axis, (key, title) in zip(axes, PANELS):
        for number, (name, seeds) in enumerate(runs.items()):
            for position, records in enumerate(seeds):
                shown = [r for r in records if key in r and r["iteration"] >= first]
                label = name if position == 0 else None
                values = [r[key] for r in shown]
                axis.plot(
                    [r["iteration"] for r in shown], values, color=f"C{number}", label=label, linewidth=1, marker="."
                )
        axis.set_xlabel("iteration")
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[-1].legend(fontsize="small")
    part = output.with_name(f".{output.stem}.{os.getpid()}{output.suffix}")
    try:
        figure.savefig(part, dpi=150)
        os.replace(part, output)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}") from None
    finally:
        if part.exists():
            part.unlink()


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that train_cifar.py wrote")
    parser.add_argument("--output", type=Path, required=True, help=f"the figure, {', '.join(FORMATS)}")
    parser.add_argument("--labels", nargs="+", help="names of the runs (default: their folders')")
    parser.add_argument("--first", type=int, default=0, help="leave out what is before this iteration")
    options = parser.parse_args(argv)
    try:
        if options.output.suffix.lower() not in FORMATS:
            raise UserError(f"--output {options.output}: expected a name that ends in {', '.join(FORMATS)}")
        labels = options.labels or [run.resolve().name for run in options.runs]
        if len(labels) != len(options.runs) or len(set(labels)) < len(labels):
            raise UserError(f"--labels: expected {len(options.runs)} different names, one a run")
        runs = {label: seeds_of(run) for label, run in zip(labels, options.runs)}
        runs = {label: seeds for label, seeds in runs.items() if seeds}
        if not runs:
            raise UserError("there is nothing to draw: no run has finished an epoch")
        draw(runs, options.output, options.first)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(runs)} runs drawn into {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
