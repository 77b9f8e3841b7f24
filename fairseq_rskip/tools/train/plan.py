"""From a corpus, an architecture, this machine and the user's options to a training command."""

import argparse
import filecmp
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.models import (
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    FairseqLanguageModel,
)

from fairseq_rskip.console import to_argv
from fairseq_rskip.errors import UserError
from fairseq_rskip.residual.schedule import last_ramp
from fairseq_rskip.tools.corpus import CHECKPOINTS, PREPARATION, Corpus
from fairseq_rskip.tools.process import PLUGIN, environment
from fairseq_rskip.tools.recipes import (
    CPU,
    CPU_SAVE_INTERVAL,
    RECIPES,
    Recipe,
    peak_lr,
    recipe_for,
)
from fairseq_rskip.tools.train.fairseq_options import (
    Parsed,
    check_checkpoint,
    check_model,
    check_task,
    parse,
)
from fairseq_rskip.tools.train.saved import FREE, PARENT, SavedTraining
from fairseq_rskip.tools.train.schedule import LENGTHS, Schedule, step_options, tokens_per_step
from fairseq_rskip.tools.training_files import LAST

FP16 = {"fp16", "memory-efficient-fp16"}
PRECISIONS = {*FP16, "bf16", "memory-efficient-bf16", "amp", "tpu"}
CHECKPOINTS_ON_CPU = 5  # that are kept with --save-interval-updates: those that are averaged
MEASURED = 100  # updates from one measure of the skip connections to the next


class Plan(NamedTuple):
    """A training: its ``command``, its folder ``save``, and lines for the user.

    ``end`` is the last of ``unit`` ("updates" or "epochs"), 0 for none; ``patience`` is fairseq's,
    0 for none. ``saved`` is the training in ``save`` that is resumed, None where --restore-file
    names another start than that folder's last checkpoint. ``settings`` are the options that the
    training is known by, the user's and those of its skip connections, by name with dashes;
    ``warm_up`` counts updates. ``switches`` are the options that are on by the architecture, or
    in the command, by name with dashes.
    """

    command: list[str]
    save: Path
    corpus: Corpus
    end: int
    unit: str
    patience: int
    saved: SavedTraining | None
    settings: dict[str, Any]
    warm_up: int
    switches: set[str]
    notes: list[str]
    warnings: list[str]

    def check_parent(self) -> None:
        """Raise ``UserError`` unless the model that a new training starts from is a file."""
        parent = self.settings.get(PARENT)
        if parent and not (self.save / LAST).exists():
            check_checkpoint(PARENT, parent, self.save)

    def why_finished(self) -> str:
        """Why there is nothing to train, where fairseq would train further; else "".

        Raises ``UserError`` if what has ended is a training with other settings,
        ``CheckpointError``.
        """
        if self.saved is None:
            return ""
        reason = self.saved.why_ended(self.end, self.unit, self.patience)
        if reason:
            self.saved.check_settings(self.settings)
        return reason

    def changes(self) -> list[str]:
        """A warning where the training that is resumed had other settings so far.

        Raises ``UserError`` if it began with other weights or values, ``CheckpointError``.
        """
        if self.saved is None:
            return []
        self.saved.check_start(self.settings)
        # the recipe's warm-up follows the length: with a longer --max-update the rate would jump
        differing = self.saved.differences({"warmup-updates": self.warm_up, **self.settings})
        if not differing:
            return []
        listed = ", ".join(f"{name} {before}, now {now}" for name, before, now in differing)
        warning = f"the training in {self.save} had {listed}; another --save-dir begins a new one"
        name, before, _ = differing[0]
        if name == "warmup-updates" and name not in self.settings:  # it is compared first
            warning += f", --{name} {before} keeps its schedule"
        return [warning]


def make_plan(own: argparse.Namespace, words: list[str]) -> Plan:
    """The plan for what ``main.read`` returns. Writes nothing. Raises ``UserError``."""
    corpus = _in_one_language(own)
    recipe_name = own.recipe or corpus.known or _recipe_by_size(corpus)
    recipe = RECIPES[recipe_name]
    task = _task_options(corpus)
    # with the option to share embeddings: the parser says whether the architecture has it
    parsed = parse(own.arch, {**task, **recipe.options, _tie(corpus): True}, words)
    user_options = parsed.user_options
    corpus = _in_direction(corpus, user_options)
    of_model = _options_of_model(own, corpus, parsed)
    schedule = Schedule(recipe, user_options)
    device, devices = device_options(own, user_options)
    processes = user_options.get("distributed-world-size") or devices
    step = step_options(recipe.tokens, processes, user_options)

    notes = [_recipe_note(own, corpus, recipe_name, schedule), *schedule.notes()]
    if step:
        notes.append(tokens_per_step(step, processes, recipe.tokens))
    save = Path(user_options.get("save-dir") or CHECKPOINTS / Path(corpus.name).name / own.arch)
    saves = _saves_on_cpu(recipe, user_options) if "cpu" in device else {}
    below_recipe = {"lr": f"{_default_lr(parsed.model):g}", **device}
    above_recipe = {
        **task,
        **of_model,
        **step,
        **saves,
        "warmup-updates": schedule.warm_up,
        "skip-invalid-size-inputs-valid-test": True,
        "save-dir": save,
        "log-format": "json",
        "tensorboard-logdir": save / "tensorboard",
        **_measures(parsed.model),
    }
    chosen = {"user-dir": PLUGIN, "arch": own.arch}
    chosen |= {**below_recipe, **recipe.options, **above_recipe}
    command = _command(corpus, chosen, parsed, words)
    return Plan(
        command=command,
        save=save,
        corpus=corpus,
        end=schedule.end,
        unit=schedule.unit,
        patience=schedule.patience,
        saved=_saved_training(save, user_options),
        settings=_settings(own.arch, parsed),
        warm_up=schedule.warm_up,
        switches=_switches(parsed.model, command),
        notes=notes,
        warnings=[
            *_warnings_of_corpus(corpus),
            *_warnings_of_device(own, device),
            *schedule.warnings(),
            *_warnings_of_ramp(parsed.model, schedule),
        ],
    )


def _saved_training(save: Path, user_options: dict[str, Any]) -> SavedTraining | None:
    """What is in the folder ``save`` to go on with; None beside --restore-file, which starts there.

    Raises ``UserError`` for a checkpoint that is not there, or with --finetune-from-model.
    """
    start = user_options.get("restore-file", LAST)
    if start == LAST:
        return SavedTraining(save)
    if PARENT in user_options:
        raise UserError(f"--{PARENT} beside --restore-file: expected one of them")
    check_checkpoint("restore-file", start, save)
    return None


def _options_of_model(own: argparse.Namespace, corpus: Corpus, parsed: Parsed) -> dict[str, Any]:
    """What follows from the model: whether embeddings are shared, and an adaptive criterion.

    Raises ``UserError`` for a model of another task, and for one that cannot be built.
    """
    is_adaptive = bool(getattr(parsed.model, "adaptive_softmax_cutoff", None))
    joined = _has_one_dictionary(corpus)
    share = (
        joined and not is_adaptive and "share-decoder-input-output-embed" not in parsed.user_options
    )
    check_task(own.arch, corpus)
    if not own.model_checked:
        check_model(
            own.arch, parsed.model, joined, share or "share-all-embeddings" in parsed.user_options
        )

    chosen: dict[str, Any] = {_tie(corpus): share}
    if is_adaptive:
        chosen |= {"criterion": "adaptive_loss", "ddp-backend": "legacy_ddp"}
    return chosen


def _measures(model: argparse.Namespace) -> dict[str, int]:
    """The measures of the skip connections, for their warnings; fairseq's own models have none."""
    return {"skip-log-interval": MEASURED} if hasattr(model, "skip_log_interval") else {}


def _tie(corpus: Corpus) -> str:
    """The option that shares all embeddings that can be shared."""
    return "share-decoder-input-output-embed" if corpus.is_monolingual else "share-all-embeddings"


def _settings(arch: str, parsed: Parsed) -> dict[str, Any]:
    """What the training is known by: the user's options, and those of its skip connections."""
    settings = {"arch": arch}
    config_class = MODEL_DATACLASS_REGISTRY.get(arch)
    if config_class is not None:
        # not of the parser: fairseq has options --skip-… of its own
        for name in vars(config_class()):
            if name.startswith("skip_"):
                settings[name.replace("_", "-")] = getattr(parsed.model, name)
    settings |= parsed.user_options
    free = FREE | PRECISIONS
    return {name: value for name, value in settings.items() if name not in free}


def _command(corpus: Corpus, chosen: dict[str, Any], parsed: Parsed, words: list[str]) -> list[str]:
    """fairseq-train with the options ``chosen``, less those that the user's ``words`` set."""
    left_out = {*parsed.user_options, *parsed.unused}
    if LENGTHS & parsed.user_options.keys():
        left_out |= LENGTHS
    options_left = {name: value for name, value in chosen.items() if name not in left_out}

    program = shutil.which("fairseq-train", path=environment()["PATH"]) or "fairseq-train"
    return [program, str(corpus.folder.absolute()), *to_argv(options_left), *words]


def _switches(model: argparse.Namespace, command: list[str]) -> set[str]:
    """The options that are on in ``model``, and those in ``command``."""
    of_model = {name.replace("_", "-") for name, value in vars(model).items() if value is True}
    return of_model | {word.removeprefix("--") for word in command if word.startswith("--")}


def _recipe_by_size(corpus: Corpus) -> str:
    """The name of the recipe for your own text."""
    return "text" if corpus.is_monolingual else recipe_for(corpus.pairs)


def _in_one_language(own: argparse.Namespace) -> Corpus:
    """The corpus, a text if it is not prepared yet and the architecture is a language model."""
    corpus: Corpus = own.corpus
    model_class = ARCH_MODEL_REGISTRY.get(own.arch, object)
    if not (corpus.exists or corpus.known) and issubclass(model_class, FairseqLanguageModel):
        return replace(corpus, target="")  # a text that is not prepared yet
    return corpus


def _task_options(corpus: Corpus) -> dict[str, str]:
    """fairseq's task and languages for the corpus."""
    if corpus.is_monolingual:
        return {"task": "language_modeling"}
    if corpus.source:
        return {"source-lang": corpus.source, "target-lang": str(corpus.target)}
    return {}


def _in_direction(corpus: Corpus, user_options: dict[str, Any]) -> Corpus:
    """``corpus`` from the user's --source-lang to --target-lang.

    Raises ``UserError`` where preparation.json, and so evaluation, has another direction.
    """
    source = user_options.get("source-lang") or corpus.source
    target = user_options.get("target-lang") or corpus.target
    if corpus.preparation and (source, target) != (corpus.source, corpus.target):
        raise UserError(
            f"{corpus.folder / PREPARATION} says {corpus.source}-{corpus.target}: "
            "expected that direction"
        )
    return replace(corpus, source=source, target=target)


def _has_one_dictionary(corpus: Corpus) -> bool:
    """Whether both languages have the same dictionary, so that embeddings can be shared.

    ``rskip prepare`` will make one dictionary where none is prepared yet.
    """
    if not corpus.exists or corpus.is_monolingual:
        return True
    return filecmp.cmp(*corpus.dictionaries(), shallow=False)


def _default_lr(model: argparse.Namespace) -> float:
    """``peak_lr`` for the model's dimension; 512 where it has none of fairseq's names."""
    for name in ("encoder_embed_dim", "decoder_embed_dim"):
        dimension = getattr(model, name, None)
        if dimension:
            return peak_lr(dimension)
    return peak_lr(512)


def _recipe_note(
    own: argparse.Namespace, corpus: Corpus, recipe_name: str, schedule: Schedule
) -> str:
    """A line with the recipe, why it is this one if a corpus's size decided, and the length."""
    why = ""
    if corpus.pairs and not (own.recipe or corpus.known):
        unit = "lines" if corpus.is_monolingual else "pairs"
        why = f" (for {corpus.pairs:,} {unit}; --recipe NAME selects another)"
    length = f": {schedule}" if schedule.end else ""
    return f"recipe: {recipe_name}{why}{length}"


def _gpus(own: argparse.Namespace) -> int:
    """The number of GPUs that --gpus allows, or that torch sees."""
    return torch.cuda.device_count() if own.gpus is None else own.gpus


def device_options(
    own: argparse.Namespace, user_options: dict[str, Any]
) -> tuple[dict[str, Any], int]:
    """--fp16 or --cpu, and the number of processes. Raises ``UserError`` for fp16 without a GPU."""
    gpus = _gpus(own)
    if gpus and "cpu" not in user_options:
        return {"fp16": not (own.no_fp16 or PRECISIONS & user_options.keys())}, gpus

    if FP16 & user_options.keys():
        reason = "--cpu is given" if gpus else "torch sees none"
        raise UserError(f"--fp16 needs a GPU, and {reason}")
    # not one process for each GPU
    return {**CPU, "cpu": True, "distributed-world-size": 1}, 1


def _saves_on_cpu(recipe: Recipe, user_options: dict[str, Any]) -> dict[str, int]:
    """Which updates are saved between two epochs, in place of the recipe's."""
    if user_options.get("save-interval-updates"):
        return {"keep-interval-updates": CHECKPOINTS_ON_CPU}
    if recipe.options.get("save-interval-updates") == 0:  # the recipe wants none
        return {}
    return {"save-interval-updates": CPU_SAVE_INTERVAL, "keep-interval-updates": 1}


def _warnings_of_corpus(corpus: Corpus) -> list[str]:
    if corpus.exists or corpus.known:
        return []
    return [f"{corpus.folder} is not prepared: the recipe is that of a corpus of unknown size"]


def _warnings_of_device(own: argparse.Namespace, device: dict[str, Any]) -> list[str]:
    if "cpu" not in device:
        return []
    reason = "" if _gpus(own) else "torch sees no GPU: "
    return [f"{reason}training on the CPU, which is slow"]


def _warnings_of_ramp(model: argparse.Namespace, schedule: Schedule) -> list[str]:
    """A line where the training ends before every branch has its full weight."""
    kind = str(getattr(model, "skip_kind", ""))
    sides = [getattr(model, f"{side}_layers", None) or 0 for side in ("encoder", "decoder")]
    ramp = last_ramp(kind, max(sides), getattr(model, "skip_warmup", None))
    if schedule.unit != "updates" or not 0 < schedule.end < ramp:
        return []
    share = schedule.end / ramp
    return [
        f"at the end the last layer's branches have {share:.2g} of their full weight, which they "
        f"have from update {ramp:,} on; --skip-warmup N changes it (prores: times the layers)"
    ]
