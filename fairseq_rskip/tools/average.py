"""Average the weights of several fairseq checkpoints into one.

    average_checkpoints.py --inputs DIR --num-update-checkpoints 5 --output DIR/averaged.pt
    average_checkpoints.py --inputs a.pt b.pt c.pt --output averaged.pt

Settings and everything else come from the first (with a directory: the newest) input, but for the optimizer's state,
which belongs to one input only and is left out.
"""

import argparse
from collections import OrderedDict
from pathlib import Path

import torch

from fairseq_rskip.console import Parser, whole_number
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.files import write_atomically
from fairseq_rskip.safe_load import CheckpointError, diverged, load_checkpoint
from fairseq_rskip.tools.train.save import numbered


def last_checkpoints(folder: Path, count: int, unit: str, upper_bound: int | None = None) -> list[Path]:
    """The ``count`` newest checkpoints in ``folder``, newest first.

    ``unit`` is "epoch" (checkpoint7.pt) or "update" (checkpoint_7_4000.pt); numbers above ``upper_bound`` do not count.
    Raises ``UserError`` if there are fewer.
    """
    if not folder.is_dir():
        raise UserError(f"--num-{unit}-checkpoints needs a directory as --inputs, got {folder}")
    found = [path for number, path in numbered(folder, unit) if upper_bound is None or number <= upper_bound]
    if len(found) < count:
        bound = "" if upper_bound is None else f" up to {unit} {upper_bound}"
        raise UserError(f"{folder} holds {len(found)} {unit} checkpoints{bound}, {count} are needed")
    return found[:count]


def load_state(path: Path) -> dict:
    """One checkpoint of fairseq whose model can be used, safely loaded, on the CPU. Raises ``CheckpointError``."""
    state = load_checkpoint(path, map_location="cpu")
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise CheckpointError(f"{path} is not a fairseq checkpoint: it has no entry 'model'")
    if "cfg" not in state and "args" not in state:
        whose = f"; it is one of {state['format']}" if isinstance(state.get("format"), str) else ""
        raise CheckpointError(f"{path} is not a fairseq checkpoint: it has no settings ('cfg' or 'args'){whose}")
    if not state["model"]:
        raise CheckpointError(f"{path} holds an empty model: it has no parameters")
    for name, value in state["model"].items():
        if not isinstance(value, torch.Tensor):
            found = type(value).__name__
            raise CheckpointError(f"{path} is not a fairseq checkpoint: {name} is a {found}, not a tensor")
        if diverged(name, value):
            raise CheckpointError(f"{path} is of no use: {name} holds NaN or infinity, so its training has diverged")
    return state


def check_alike(first: dict, other: dict, first_path: Path, path: Path) -> None:
    """Raises ``CheckpointError`` naming the parameter if two models differ in names, shapes or dtypes."""
    for name in list(first) + list(other):
        if name not in first or name not in other:
            holder, lacking = (first_path, path) if name in first else (path, first_path)
            raise CheckpointError(f"cannot average: {name} is in {holder} but not in {lacking}")
        a, b = first[name], other[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            raise CheckpointError(
                f"cannot average: {name} is {tuple(a.shape)} {a.dtype} in {first_path}"
                f" but {tuple(b.shape)} {b.dtype} in {path}"
            )


def average(paths: list[Path]) -> dict:
    """The first checkpoint with the mean of all weights.

    Sums are in float64 and rounded once, to the dtype that is stored. Integer and boolean buffers are counters and
    flags, which have no mean: the first checkpoint's stay. Tensors that share memory (tied embeddings) still do.
    """
    result = load_state(paths[0])
    result.pop("last_optimizer_state", None)
    model = result["model"]
    sums = {name: value.double() for name, value in model.items() if value.is_floating_point()}
    for path in paths[1:]:
        other = load_state(path)["model"]
        check_alike(model, other, paths[0], path)
        for name, total in sums.items():
            total += other[name]
    means: dict = {}
    averaged = OrderedDict()
    if hasattr(model, "_metadata"):
        averaged._metadata = model._metadata  # the rule of each skip connection, with which it is compared when loaded
    for name, value in model.items():
        if name in sums:
            place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            averaged[name] = means.setdefault(place, (sums.pop(name) / len(paths)).to(value.dtype))
        else:
            averaged[name] = value
    result["model"] = averaged
    return result


def save(state: dict, path: Path) -> None:
    """Write ``state``: a killed run leaves no half-written checkpoint. Raises ``UserError``."""
    write_atomically(path, lambda file: torch.save(state, file))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options. A mistake ends the program with one line."""
    parser = Parser(description=__doc__)
    parser.add_argument("--inputs", nargs="+", type=Path, required=True, help="checkpoints, or one directory of them")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the checkpoint to write")
    number = parser.add_mutually_exclusive_group()
    for unit, form in (("epoch", "checkpoint<epoch>.pt"), ("update", "checkpoint_<epoch>_<update>.pt")):
        name = f"--num-{unit}-checkpoints"
        number.add_argument(name, type=whole_number(1), metavar="N", help=f"the last N of {form}")
    parser.add_argument(
        "--checkpoint-upper-bound", type=int, metavar="M", help="pass over checkpoints after epoch or update M"
    )
    return parser.parse_args(argv)


def choose(options: argparse.Namespace) -> list[Path]:
    """The checkpoints that the command line asks for. Raises ``UserError``."""
    unit = "epoch" if options.num_epoch_checkpoints is not None else "update"
    count = getattr(options, f"num_{unit}_checkpoints")
    if count is None:
        if options.checkpoint_upper_bound is not None:
            raise UserError("--checkpoint-upper-bound needs --num-epoch-checkpoints or --num-update-checkpoints")
        for path in options.inputs:
            if path.is_dir():
                raise UserError(f"{path} is a directory: say --num-epoch-checkpoints N or --num-update-checkpoints N")
        return options.inputs
    if len(options.inputs) != 1:
        raise UserError(f"--num-{unit}-checkpoints takes one directory as --inputs, got {len(options.inputs)} paths")
    return last_checkpoints(options.inputs[0], count, unit, options.checkpoint_upper_bound)


def run(options: argparse.Namespace) -> None:
    """Write the average, say of what it is. Raises ``UserError``."""
    paths = choose(options)
    save(average(paths), options.output)
    print(f"averaged {', '.join(str(path) for path in paths)} into {options.output}")


def main(argv: list[str] | None = None) -> int:
    """Do what ``argv`` asks for; returns the exit status."""
    options = parse(argv)
    return exit_status(lambda: run(options))
