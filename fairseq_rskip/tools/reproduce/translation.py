"""A cell trained by train.sh and scored by evaluate.sh: its settings, its commands, how far it is, what came out."""

import functools
import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any

from fairseq_rskip.console import as_words, checked
from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.corpus import Corpus as Prepared
from fairseq_rskip.tools.evaluate.arguments import parse as parse_evaluate
from fairseq_rskip.tools.train.data import find_data as find
from fairseq_rskip.tools.train.options import check_ranges
from fairseq_rskip.tools.train.recipes import GENERAL, NAMES, RECIPES

from .tables import ROOT, Cell, Corpus, Options, Settings, StandIn, dashed, one_number, tool

CHECKPOINTS = "checkpoints"
EVALUATION = "evaluation"
EVALUATE = ("average", "beam", "lenpen", "max-tokens", "cpu", "fp32")  # of evaluate.sh's options
OURS = ("save-dir", "seed", "arch", "user-dir", "restore-file")
FREE = ("skip-log-interval", "log-interval", "num-workers", "tensorboard-logdir", "no-fp16")  # no part of what a run is
PROGRESS = {"updates": r"num_updates(?:[= ]|\": \")(\d+)", "epochs": r"end of epoch (\d+)"}
LOGGED = r'\| (train_inner|train|valid) \| .*?"(?:train_|valid_)?loss": "([^"]+)"'  # fairseq with --log-format json
LOSSES = {"valid_loss": "best", "last_valid_loss": "val_loss"}  # -> what fairseq calls them
LOG_TAIL = 100_000  # bytes
SHARE, AVERAGED = 20, 3  # a shortened run saves, and validates, every 20th of itself: the last three are averaged


def find_data(corpus: str) -> str:
    """``--corpus`` as train.sh takes it: the name of a corpus, or a prepared folder's path. Raises ``UserError``."""
    if corpus in NAMES:
        return corpus
    path = Path(corpus).expanduser()
    if not path.is_dir():
        raise UserError(f"the data {corpus!r} is no prepared folder, and none of {', '.join(NAMES)}")
    return str(path.resolve())


def check_data(data: str) -> None:
    """Raise ``UserError`` for what train.sh or, hours later, evaluate.sh would refuse as not prepared."""
    find(data, dry_run=False).dictionaries({})
    Prepared.find(_prepared(data), prepared=True).references("test")


def preparation(data: str, corpus: Corpus | None) -> list[str]:
    """The command that prepares ``data``, a name, or a folder of which ``corpus`` has the text; [] where there is none.

    Raises ``UserError`` for files that are not there.
    """
    if corpus is None:
        command = RECIPES[data].prepare.split() if data in NAMES else []
        there = not command or find(data, dry_run=True).there
        return [] if there or not command[0].startswith("data-prep/") else [str(ROOT / command[0]), *command[1:]]
    words = ["--src", corpus.source, "--tgt", corpus.target]
    for split in ("train", "valid", "test"):
        for side, name in zip(("src", "tgt"), getattr(corpus, split)):
            path = Path(name).expanduser().absolute()
            if not path.is_file():
                raise UserError(f"data: {split} names {name!r}; there is no file {path}")
            words += [f"--{split}-{side}", str(path)]
    return [str(ROOT / "data-prep" / "prepare-corpus.sh"), *words, *as_words(dashed(corpus.options)), data]


def data_name(data: str) -> str:
    """The corpus that is in ``data``, as its preparation.json says; a folder's own name, if no corpus has it."""
    if data not in NAMES and not Path(data).exists():  # still to be prepared
        return Path(data).name
    found = find(data, dry_run=True)
    return f"folder {found.name}" if found.recipe not in NAMES and found.name in NAMES else found.name


def recipe_name(data: str) -> str:
    """The recipe that train.sh has for ``data``; the general one where that has gone."""
    try:
        return find(data, dry_run=True).recipe
    except UserError:
        return GENERAL


def settings(cell: Cell, data: str, stand_in: StandIn, scale: float, changed: Options) -> Settings:
    """The architecture and fairseq-train's options beside the corpus's recipe, shortened to ``scale`` of its length.

    Raises ``UserError`` for an architecture that does not exist, or what train.sh refuses.
    """
    options = {name: _plain(name, value) for name, value in {**stand_in.options, **cell.options, **changed}.items()}
    taken = sorted(set(options) & set(OURS))
    if taken:
        raise UserError(f"option {taken[0]!r} cannot be given here: every run gets its own")
    recipe_of = recipe_name(data)
    recipe = RECIPES[recipe_of].options
    check(cell.arch, recipe_of, tuple(as_words(options)))
    shortened = scale != 1 or (stand_in.updates > 0 and "max-epoch" not in options)
    if shortened:
        options = _shortened(data, recipe, stand_in, scale, options)
        check(cell.arch, recipe_of, tuple(as_words(options)))
    ends = options if {"max-update", "max-epoch"} & set(options) else recipe  # train.sh leaves the recipe's out, too
    unit, end = ("updates", "max-update") if "max-update" in ends else ("epochs", "max-epoch")
    length, average, corpus = int(ends[end]), AVERAGED if shortened else 0, data_name(data)
    identity = {"data": corpus, "arch": cell.arch, "unit": unit, "length": length}
    identity["options"] = {name: value for name, value in options.items() if name not in FREE}
    identity.update({"average": average} if average and cell.scored else {})
    identity.update({} if cell.scored else {"scored": False})
    evaluate = _check_evaluate(cell.evaluate) if cell.evaluate else {}
    identity.update({"evaluate": evaluate} if evaluate else {})
    weight = options.get("skip-lambda")
    name = "-".join(filter(None, [corpus, cell.arch, f"lambda{weight}" if weight else "", str(length)]))
    return Settings(data, options, identity, name, length, unit, cell.arch, average, cell.scored, evaluate)


def _check_evaluate(options: Options) -> Options:
    """``options`` one way for one number. Raises ``UserError`` for what evaluate.sh refuses, or is set by us."""
    options = {name: _plain(name, value) for name, value in options.items()}
    for name in options:
        if name not in EVALUATE:
            raise UserError(f"evaluate names {name!r}; expected {', '.join(EVALUATE)}")
    checked(parse_evaluate, ["DATA", "FOLDER", *as_words(options)])
    return options


def _plain(name: str, value: Any) -> Any:
    """``value``, one way for one number. Raises ``UserError`` for a list."""
    if isinstance(value, list):
        raise UserError(f"option {name!r} is {value!r}; expected one value, text as fairseq-train has it")
    return one_number(value)


def _shortened(data: str, recipe: Options, stand_in: StandIn, scale: float, options: Options) -> Options:
    """``options`` with updates, warm-up and checkpoints of a run that is not the recipe's own. Raises ``UserError``."""
    whole = 0 if "max-epoch" in options else stand_in.updates or recipe.get("max-update", 0)
    whole = int(options.get("max-update") or whole)
    if not whole:
        raise UserError(f"{data} is trained by epochs, which --scale cannot shorten: give --set max-update=N")
    updates, warmup = max(1, round(whole * scale)), int(options.get("warmup-updates", recipe["warmup-updates"]))
    saving = {
        "no-epoch-checkpoints": True,
        "save-interval-updates": max(1, updates // SHARE),
        "keep-interval-updates": 10,
    }
    return {**saving, **options, "max-update": updates, "warmup-updates": max(1, round(warmup * scale))}


@functools.cache  # rows of a table, and tables, share much, and `rskip run` plans twice
def check(arch: str, recipe: str, words: tuple[str, ...]) -> None:
    """Have train.sh's planner read the options ``words`` beside those of ``recipe``. Raises ``UserError``."""
    from fairseq_rskip.tools.train.options import Options as Reader
    from fairseq_rskip.tools.train.options import check_arch, find_user_dir

    check_ranges(list(words))
    check_arch(arch, find_user_dir(list(words)))
    Reader(arch, RECIPES[recipe].options, list(words))


def commands(settings: Settings, seed: int, folder: Path) -> list[list[str]]:
    """The command lines that fill ``folder``: training, then beam search and scores if a metric asks for them."""
    save = folder / CHECKPOINTS
    words = [*as_words({**settings.options, **_kept(settings)}), "--seed", str(seed), "--save-dir", str(save)]
    train = [*tool("train.sh", "train"), settings.data, settings.arch, *words]
    average = {"average": settings.average} if settings.average else {}
    ours = ["--out", str(folder / EVALUATION), *as_words({**average, **settings.evaluate})]
    evaluate = [*tool("evaluate.sh", "evaluate"), _prepared(settings.data), str(save), *ours]
    return [train, evaluate] if settings.scored else [train]


def _kept(settings: Settings) -> Options:
    """What keeps as many checkpoints as evaluate's ``average`` needs, where the recipe, or train.sh's, would not.

    It is no part of the settings' identity.
    """
    count, recipe = int(settings.evaluate.get("average", 0)), RECIPES[recipe_name(settings.data)].options
    saving = {**recipe, **settings.options}
    by_updates = "save-interval-updates" in saving or "no-epoch-checkpoints" in saving
    names = ["keep-interval-updates"] if by_updates else []
    names += ["keep-last-epochs"] if "keep-last-epochs" in recipe else []
    return {name: count for name in names if name not in settings.options and count > recipe.get(name, 0)}


def _prepared(data: str) -> str:
    return data if Path(data).is_dir() else str(ROOT / "data" / data)


def progress(settings: Settings, folder: Path) -> tuple[float, str]:
    """The part of the training that is done, from 0 to 1, and its last losses in words, as train.log's end says.

    A run that has trained all of it, and is not done, is being evaluated.
    """
    path = folder / CHECKPOINTS / "train.log"
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL))
            tail = file.read().decode("utf-8", "replace")
    except OSError:
        return 0.0, ""
    done = re.findall(PROGRESS[settings.unit], tail)
    losses = {source.partition("_")[0]: value for source, value in re.findall(LOGGED, tail)}
    told = [f"{name} loss {losses[name]}" for name in ("train", "valid") if name in losses]
    part = min(1.0, int(done[-1]) / settings.length) if done else 0.0
    told += ["evaluating"] if part == 1.0 and (folder / EVALUATION).is_dir() else []
    return part, ", ".join(told)


def metrics(settings: Settings, folder: Path) -> dict[str, Any] | None:
    """``values`` and ``signatures`` by the names of evaluate.sh's scores, or None if the run is not finished.

    valid_loss and last_valid_loss are the label-smoothed losses per token, in bits, of the held-out set.
    """
    losses = _valid_losses(folder / CHECKPOINTS)
    if not settings.scored:
        versions = {name: importlib.metadata.version(name) for name in ("fairseq", "torch")}
        return {"values": losses, "versions": {"python": sys.version.split()[0], **versions}} if losses else None
    try:
        report = json.loads((folder / EVALUATION / "scores.json").read_text("utf-8"))
        values = {row["name"]: float(row["score"]) for row in report["scores"]}
        signatures = {row["name"]: row["signature"] for row in report["scores"]}
        versions = {"python": sys.version.split()[0], **report["evaluation"].get("versions", {})}
        about = {"sentences": report["sentences"], "references": report["ref"]}
        about["weights"] = report["evaluation"]["weights"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    values.update(losses)
    return {"values": values, "signatures": signatures, "unit": "BLEU", **about, "versions": versions}


def _valid_losses(folder: Path) -> dict[str, float]:
    """The lowest loss on the held-out set, and the last one, as fairseq keeps them in its last checkpoint.

    Nothing where a training chooses its best checkpoint by another metric than the loss.
    """
    from fairseq_rskip.safe_load import load_checkpoint

    try:
        checkpoint = load_checkpoint(folder / "checkpoint_last.pt", map_location="cpu")
        if checkpoint["cfg"]["checkpoint"]["best_checkpoint_metric"] != "loss":
            return {}
        found = {name: checkpoint["extra_state"].get(key) for name, key in LOSSES.items()}
    except (UserError, OSError, KeyError, TypeError):
        return {}
    return {name: float(value) for name, value in found.items() if value is not None}
