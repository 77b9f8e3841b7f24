"""Choose checkpoints of fairseq, check that they can be used, and average their weights."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import writing
from fairseq_rskip.pretrained import check_is_not_bundled
from fairseq_rskip.residual import own_rules
from fairseq_rskip.residual.state import check_file
from fairseq_rskip.safe_load import CheckpointError, diverged, load_checkpoint
from fairseq_rskip.tools import cached
from fairseq_rskip.tools.training_files import (
    BEST,
    CHECKPOINTS,
    LAST,
    NUMBERED,
    epochs_before,
    numbered,
    section,
)

AVERAGED = 5  # checkpoints of a translation model, unless a command is given another number
# whose differences a comparison names: a rule may have its own learning rate, but the same data
TRAINING_OPTIONS = {
    "optimization": ("max_update", "max_epoch", "update_freq", "lr"),
    "dataset": ("max_tokens", "batch_size"),
    "distributed_training": ("distributed_world_size",),
    "lr_scheduler": ("warmup_updates",),
    "common": ("seed",),
}
# fairseq's matrices whose vectors nGPT keeps at length 1, and their axis of the model's dimension
UNIT_VECTORS = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "fc1": 1, "out_proj": 0, "fc2": 0}
ACCEPTED = (
    "accepted are checkpoint<epoch>.pt, checkpoint_<epoch>_<update>.pt, "
    "checkpoint_best.pt or checkpoint_last.pt"
)


def choose(folder: Path, count: int, checkpoint: Path | None = None) -> tuple[list[Path], str]:
    """The checkpoints whose weights are averaged, newest first, and a line that says which.

    They are, the first that there is:

    * ``checkpoint``, a path or a name in ``folder``;
    * the newest ``count`` of those that are numbered by update, or by epoch if that gives more
      (at most ``count``), if there are two or more, or if ``count`` is 1;
    * checkpoint_best.pt, checkpoint_last.pt, or the only numbered one.

    Raises ``UserError`` if there is none.
    """
    if not folder.exists():
        check_is_not_bundled(folder)
        raise UserError(f"{folder} does not exist; expected the folder that training saved to")
    if not folder.is_dir():
        hint = f", and --checkpoint {folder.name}" if folder.suffix == ".pt" else ""
        raise UserError(f"{folder} is not a folder; give the one that training saved to{hint}")
    folder = training_folder(folder)
    if checkpoint is not None:
        path = _named(checkpoint, folder)
        return [path], f"checkpoint {path}"

    unit, newest = _newest(folder, max(count, 1))
    enough = 1 if count == 1 else 2
    if count and len(newest) >= enough:
        taken = newest
    else:
        usual = [path for path in (folder / BEST, folder / LAST) if path.is_file()]
        taken = (usual + newest)[:1]
    if not taken:
        raise UserError(f"{folder} has no checkpoint: it holds {_names_in(folder)}; {ACCEPTED}")

    if len(taken) == 1:
        fewer = f" (fewer than {enough} are numbered)" if count > 1 else ""
        return taken, f"checkpoint {taken[0]}{fewer}"
    fewer = f" (fewer than {count} are numbered)" if len(taken) < count else ""
    members = ", ".join(path.name for path in taken)
    return taken, f"average of the last {len(taken)} {unit} checkpoints{fewer}: {members}"


def _named(checkpoint: Path, folder: Path) -> Path:
    """The file ``checkpoint``, a path or a name in ``folder``. Raises ``UserError``."""
    for path in (checkpoint, folder / checkpoint):
        if path.is_file():
            return path
    raise UserError(
        f"no checkpoint {checkpoint}, here or in {folder}, which holds {_names_in(folder)}"
    )


def _newest(folder: Path, count: int) -> tuple[str, list[Path]]:
    """The newest ``count`` numbered checkpoints, of updates or of epochs, and which these are.

    The unit is the one with more checkpoints in the result; if both have as many, the one that
    reaches back less far.
    """
    newest = {unit: numbered(folder, unit)[:count] for unit in NUMBERED}

    def count_and_oldest(unit: str) -> tuple[int, float]:
        paths = newest[unit]
        oldest = epochs_before(paths[-1]) if paths else 0.0
        return len(paths), oldest

    unit = max(newest, key=count_and_oldest)
    return unit, newest[unit]


def _names_in(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"


def training_folder(folder: Path) -> Path:
    """Return ``folder``, or the ``checkpoints`` in it where it has none of its own.

    Such a folder is a run's ``seed1`` of ``rskip run``.
    """
    inner = folder / CHECKPOINTS
    if inner.is_dir() and not any(folder.glob("checkpoint*.pt")):
        return inner
    return folder


def choose_by_task(folder: Path) -> tuple[list[Path], str]:
    """Call :func:`choose` with the number that every command averages by default.

    That is the last five of a translation model, and none of a language model. Raises
    ``UserError``.
    """
    single, which = choose(folder, 0)
    if task_of(single[0]).get("_name") == "language_modeling":
        return single, which
    return choose(folder, AVERAGED)


@contextlib.contextmanager
def as_one(taken: list[Path]) -> Iterator[Path]:
    """One checkpoint with the weights of ``taken``: itself, or the average of several.

    An average that an evaluation has made is used again. Any other is in a temporary folder during
    the block.
    """
    if len(taken) == 1:
        yield taken[0]
        return
    folder = taken[0].parent
    key = {"checkpoints": cached.identity(taken)}
    for near in (folder, folder.parent):  # of a run of rskip run: beside checkpoints/
        for path in sorted(near.glob("evaluation*/averaged.pt")):
            if cached.is_made(path, key):
                yield path
                return
    with tempfile.TemporaryDirectory() as temporary:
        yield one_file(taken, Path(temporary) / "checkpoint_averaged.pt")


def one_file(taken: list[Path], average_path: Path) -> Path:
    """Return the single checkpoint ``taken``, or the average of several.

    The average is written to ``average_path`` unless it is there.
    """
    if len(taken) == 1:
        return taken[0]
    key = {"checkpoints": cached.identity(taken)}
    if not cached.is_made(average_path, key):
        cached.make(average_path, key, lambda path: save(taken, path))
    return average_path


def own_rules_of(path: Path) -> list[str]:
    """The checksums now of the files of your own rules that a checkpoint's model has.

    Warns where such a file was another in training. Raises ``CheckpointError``.
    """
    if not own_rules.paths_of_files():  # saves the time to read the checkpoint
        return []
    metadata = getattr(load_state(path)["model"], "_metadata", {})
    return sorted({check_file(noted) for noted in metadata.values()} - {""})


def load_state(path: Path) -> dict:
    """Load one checkpoint of fairseq whose model can be used, safely and on the CPU.

    Raises ``CheckpointError``.
    """
    state = load_checkpoint(path, map_location="cpu")
    model = state.get("model") if isinstance(state, dict) else None
    if not (
        isinstance(model, dict)
        and model
        and all(isinstance(value, torch.Tensor) for value in model.values())
    ):
        raise CheckpointError(
            f"{path} is not a fairseq checkpoint: expected an entry 'model' with tensors"
        )
    if not (state.get("cfg") or state.get("args")):
        raise CheckpointError(
            f"{path} is not a fairseq checkpoint: it has no settings ('cfg' or 'args')"
        )
    for name, value in model.items():
        if diverged(name, value):
            raise CheckpointError(
                f"{path} cannot be used: {name} holds NaN or infinity, so its training has diverged"
            )
    return state


def task_of(path: Path, expected: str = "") -> dict:
    """Return the settings of a checkpoint's task.

    Raises ``UserError`` unless it is the task ``expected``, where one is.
    """
    state = load_state(path)
    if state.get("cfg"):
        task = section(state["cfg"], "task")
    else:  # a checkpoint from before fairseq 0.10 has all options in one Namespace
        options = vars(state["args"])
        task = {**options, "_name": options.get("task")}
    if expected and task.get("_name") != expected:
        name = task.get("_name")
        hint = "; rskip export gives it sample()" if name == "language_modeling" else ""
        raise UserError(f"{path} was trained for --task {name}: expected {expected}{hint}")
    return task


def training_options(path: Path) -> dict[str, Any]:
    """The options in ``TRAINING_OPTIONS`` with which a checkpoint was trained, by name."""
    settings = load_state(path).get("cfg") or {}
    values = {}
    for part, names in TRAINING_OPTIONS.items():
        options = section(settings, part)
        for name in names:
            if name in options:
                values[name.replace("_", "-")] = options[name]
    return values


def rules(model: dict) -> dict[str, dict[str, Any]]:
    """The rule of each skip connection of a model's state, by its name."""
    metadata = getattr(model, "_metadata", {})
    return {name: noted["skip"] for name, noted in metadata.items() if "skip" in noted}


def check_alike(first: dict, other: dict, first_path: Path, path: Path) -> None:
    """Raises ``CheckpointError`` naming what differs if two models cannot be averaged."""
    check_same_rules(first, other, first_path, path)
    for name in dict.fromkeys([*first, *other]):
        one, two = _shape_and_type(first, name), _shape_and_type(other, name)
        if one != two:
            raise CheckpointError(
                f"cannot average: {name} is {one} in {first_path} but {two} in {path}"
            )
        has_mean = first[name].is_floating_point()
        is_counter = first[name].numel() < 2
        if not (has_mean or is_counter) and not torch.equal(first[name], other[name]):
            raise CheckpointError(
                f"cannot average: {name} is {one} and differs between {first_path} and {path}"
            )


def _shape_and_type(model: dict, name: str) -> str:
    return f"{tuple(model[name].shape)} {model[name].dtype}" if name in model else "missing"


def check_same_rules(first: dict, other: dict, first_path: Path, path: Path) -> None:
    """Raises ``CheckpointError`` naming the option in which two models' skips differ."""
    one_rules, two_rules = rules(first), rules(other)
    for name in one_rules.keys() & two_rules.keys():
        one, two = one_rules[name], two_rules[name]
        for option in {**one, **two}:
            if one.get(option) != two.get(option):
                raise CheckpointError(
                    f"cannot average: {name or 'the skip connection'} has {option}="
                    f"{one.get(option)!r} in {first_path} but {two.get(option)!r} in {path}"
                )


def average(paths: list[Path]) -> dict:
    """Return the first checkpoint with the mean of all weights.

    The optimizer's state is left out: it belongs to one only. Sums are in float64 and rounded once,
    to the dtype that is stored. Counters and flags have no mean: those of the first checkpoint are
    kept. Tensors that share memory (tied embeddings) still do. The vectors of nGPT's matrices have
    length 1 again. Raises ``CheckpointError``.
    """
    result = load_state(paths[0])
    result.pop("last_optimizer_state", None)
    model = result["model"]
    sums = {}
    for name, value in model.items():
        if value.is_floating_point():
            sums[name] = value.to(torch.float64, copy=True)  # tied tensors have a sum each
    if not sums:
        raise CheckpointError(f"cannot average: {paths[0]} has no floating-point weights")
    for path in paths[1:]:
        other = load_state(path)["model"]
        check_alike(model, other, paths[0], path)
        for name, total in sums.items():
            total += other[name]
    axes = unit_vectors(model)
    for name, total in sums.items():
        mean = total / len(paths)
        if name in axes:
            mean = torch.nn.functional.normalize(mean, dim=axes[name])
        model[name].detach().copy_(mean)  # in the same state: its _metadata has each skip's rule
    return result


def unit_vectors(model: dict) -> dict[str, int]:
    """The matrices of a model's state whose vectors have length 1 -> the axis of these."""
    layers = {
        name.rpartition(".")[0] for name, rule in rules(model).items() if rule["kind"] == "ngpt"
    }
    axes = {}
    for name in model:
        module, _, parameter = name.rpartition(".")
        axis = UNIT_VECTORS.get(module.rpartition(".")[2])
        inside = any(name.startswith(f"{layer}.") for layer in layers)
        if inside and parameter == "weight" and axis is not None:
            axes[name] = axis
    return axes


def save(paths: list[Path], output: Path) -> None:
    """Write the average of ``paths``, whole or not at all. Raises ``UserError``."""
    averaged = average(paths)
    with writing(output) as file:
        torch.save(averaged, file)
