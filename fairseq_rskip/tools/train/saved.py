"""Whether a training in a folder has ended, and whether it is the one that is asked for."""

import os
from functools import cached_property
from pathlib import Path
from typing import Any

from fairseq_rskip.errors import UserError
from fairseq_rskip.flags import flag, option_name
from fairseq_rskip.residual import KINDS, own_rules
from fairseq_rskip.residual.options import options_of
from fairseq_rskip.residual.state import rule_files
from fairseq_rskip.safe_load import load_checkpoint
from fairseq_rskip.tools.training_files import LAST, early_stop, section

# parts of a checkpoint's settings that are chosen by name, as by --optimizer
CHOICES = ("criterion", "optimizer", "lr_scheduler", "task")
# all parts in which the options of a training are
PARTS = ("model", *CHOICES, "optimization", "dataset", "common")
# options in them that may differ: how long and where it is trained, what it logs, when it validates
FREE = {"max-update", "max-epoch", "no-progress-bar", "log-interval", "log-format", "log-file"}
FREE |= {"skip-log-interval", "tensorboard-logdir", "wandb-project", "cpu", "user-dir"}
FREE |= {"num-workers", "data-buffer-size", "validate-interval", "validate-interval-updates"}


PARENT = "finetune-from-model"  # the option


class SavedTraining:
    """The training in a folder, as its last checkpoint has it, which is read once."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def _checkpoint(self) -> dict[str, Any]:
        """The settings and the history of the last checkpoint, {} where there is none.

        Raises ``CheckpointError``.
        """
        if not (self.folder / LAST).exists():
            return {}
        checkpoint = load_checkpoint(self.folder / LAST, map_location="cpu")
        return {
            "cfg": checkpoint["cfg"],
            "history": checkpoint.get("optimizer_history"),
            "rule_files": rule_files(checkpoint.get("model")),
        }

    def why_ended(self, end: int, unit: str, patience: int) -> str:
        """Why it has ended, where fairseq would train further; else "".

        ``end`` is the last of ``unit`` ("updates" or "epochs"), 0 for none; ``patience`` is
        fairseq's, 0 for none. Raises ``CheckpointError``.
        """
        stopped = early_stop(self.folder)
        if stopped and 0 < patience <= stopped:
            return (
                f"{self.folder} has ended: no better validation for {stopped} epochs; "
                "a larger --patience trains further"
            )
        if unit == "epochs" or end == 0:
            return ""
        history = self._checkpoint.get("history") or [{}]
        if history[-1].get("num_updates", 0) < end:
            return ""
        return f"{self.folder} has all {end} updates: nothing to train"

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Raise ``UserError`` if it had other ``settings``, ``CheckpointError``.

        A rule in a file of your own that has changed is one.
        """
        changed = own_rules.changed_files(self._checkpoint.get("rule_files", {}))
        if changed:
            raise UserError(
                f"{self.folder} has a finished training with another version of "
                f"{', '.join(changed)}; another --save-dir keeps both"
            )
        for name, before, now in self.differences(settings):
            had = f"without {name}" if before is None else f"with {name} {before}"
            raise UserError(
                f"{self.folder} has a finished training {had}, not {now}; "
                "another --save-dir keeps both"
            )

    def check_start(self, settings: dict[str, Any]) -> None:
        """Raise ``UserError`` if it began with other weights or values, or has another rule.

        Other weights or values would change nothing but what the next checkpoint says that it began
        with; a checkpoint is refused by another rule. Raises ``CheckpointError``.
        """
        kind = settings.get("skip-kind")
        initial = _options_of(kind, "start")
        of_equation = _options_of(kind, "output")
        differing = self.differences(settings)
        for name, before, now in differing:
            if name == PARENT:
                began = f"with {before}" if before else "without it"
                raise UserError(
                    f"--{name} {now}: the training in {self.folder} began {began}; another "
                    "--save-dir begins a new one"
                )
        if any(name in ("skip-kind", "skip-norm") for name, _, _ in differing):
            return  # of another rule, which its checkpoint refuses to become
        for name, before, now in differing:
            if name in initial:
                raise UserError(
                    f"--{name} {now}: the training in {self.folder} began with {before}, and an "
                    f"initial value cannot change later; --{name} {before} continues it, another "
                    "--save-dir begins a new one"
                )
            if name in of_equation:
                raise UserError(
                    f"--{name} {now}: the training in {self.folder} has {before}; --{name} "
                    f"{before} continues it, another --save-dir begins a new one"
                )

    def differences(self, settings: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """Name, saved and asked value of the ``settings`` that it had otherwise.

        An option that its last checkpoint does not have, such as when to save, counts as equal.
        None is the default of a kind of skip. Raises ``CheckpointError``.
        """
        if not self._checkpoint:
            return []
        saved = self._checkpoint["cfg"]
        known: dict[str, Any] = {}
        for part in PARTS:
            values = section(saved, part)
            name = values.pop("_name", None)
            known |= values
            if part in CHOICES and name:
                known[part] = name
        known["arch"] = section(saved, "model").get("_name")
        parent = PARENT.replace("-", "_")
        known[parent] = section(saved, "checkpoint").get(parent)
        processes = section(saved, "distributed_training").get("distributed_world_size")
        if processes:
            known["distributed_world_size"] = processes
        kind = known.get("skip_kind")

        differing = []
        for name, value in settings.items():
            field = name.replace("-", "_")
            before = _or_default(known.get(field, value), field, kind)
            now = _or_default(value, field, kind)
            if name == PARENT and before and os.path.abspath(before) == os.path.abspath(now):
                continue
            if _comparable(before) != _comparable(now):
                differing.append((name, before, now))
        return differing


def _options_of(kind: Any, affected: str) -> set[str]:
    """The options of a kind of skip connection that affect its "start" or its "output"."""
    if kind not in KINDS:
        return set()
    names = set()
    for name, option in options_of(KINDS[kind]).items():
        if option.about.affects == affected:
            names.add(option_name(name))
    return names


def _or_default(value: Any, field: str, kind: Any) -> Any:
    """``value``; where it is None, the default of the option ``field`` in a kind of skip."""
    if value is None and kind in KINDS:
        for name, option in options_of(KINDS[kind]).items():
            if flag(name) == field:
                return option.default
    return value


def _comparable(value: Any) -> Any:
    """A value of an option such that 2, 2.0, "2" and [2.0] are equal."""
    if isinstance(value, (list, tuple)):
        if len(value) == 1:
            return _comparable(value[0])
        return [_comparable(each) for each in value]
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)
