"""What differs between tasks: how a run's options are checked, which commands it takes, and how its files are read.

A new task is a class here and an entry of ``TASKS``. torch and fairseq are imported where they are needed.
"""

import contextlib
import functools
import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fairseq_rskip.console import as_words, checked
from fairseq_rskip.errors import UserError, did_you_mean
from fairseq_rskip.tools import log
from fairseq_rskip.tools.corpus import NAMES, ROOT, Corpus
from fairseq_rskip.tools.lines import read_lines

from .records import Run, Table, dashed, one_number

CHECKPOINTS, EVALUATION = "checkpoints", "evaluation"  # folders of a translation run
EXAMPLES = 3  # translations that a record keeps for the report
BLEUS = ("13a", "intl", "intl lower-cased")


def tool(script: str, command: str) -> list[str]:
    """The first words of a command line: the script of a checkout, elsewhere the command of ``rskip``."""
    path = ROOT / "scripts" / script
    if not path.exists():
        return [sys.executable, "-m", "fairseq_rskip.tools", command]
    return [sys.executable, str(path)] if path.suffix == ".py" else [str(path)]


class Images:
    """Training by train_cifar.py."""

    metric, held_out, has_architectures = "error", "valid_error", False  # held_out decides sweeps
    # metric -> whether lower is better
    metrics = dict.fromkeys(("error", "best_error", "test_loss", "train_loss", "valid_error", "valid_loss"), True)
    over_seeds = tuple(metrics)  # of a whole run; the others are of sentences
    weights = ("checkpoint.pt",)
    reserved = ("data", "seeds", "output", "resume")

    @property
    def free(self) -> list[str]:
        """Options that change nothing in what a run computes."""
        from fairseq_rskip.vision.config import Config

        fields = Config.__dataclass_fields__
        return [name.replace("_", "-") for name, field in fields.items() if field.metadata.get("free")]

    def find_data(self, data: str) -> str:
        """``data`` as train_cifar.py takes it: a path is a folder of images. Raises ``UserError``."""
        from fairseq_rskip.vision.config import DATA_SETS, FOLDER

        path = Path(data.removeprefix(FOLDER)).expanduser()
        if data not in DATA_SETS and not path.is_dir():
            raise UserError(f"the data {data!r} is no folder of images and none of {', '.join(DATA_SETS)}")
        return data if data in DATA_SETS else f"{FOLDER}{path.resolve()}"

    def data_name(self, data: str) -> str:
        """The name of ``data`` in a report, and in what identifies a run: a folder's own name."""
        from fairseq_rskip.vision.config import DATA_SETS, FOLDER

        name = Path(data.removeprefix(FOLDER)).name
        return f"folder {name}" if data.startswith(FOLDER) and name in DATA_SETS else name

    def check_data(self, data: str) -> None:
        """Raise ``UserError`` for a folder without images; data sets are downloaded."""
        from fairseq_rskip.vision.config import FOLDER
        from fairseq_rskip.vision.imagefolder import ARCHIVES, SPLITS

        path = Path(data.removeprefix(FOLDER))
        for split in SPLITS if data.startswith(FOLDER) else ():
            names = [split, *(split + suffix for suffix in ARCHIVES)]
            if not any((path / name).exists() for name in names):
                raise UserError(f"{path} is no folder of images: it has none of {', '.join(names)}")

    def make_run(self, table: Table, arch: str, data: str, options: dict[str, Any]) -> tuple[Run, list[str]]:
        """The run, without seed and folder, and warnings. Raises ``UserError`` as train_cifar.py would."""
        config, defaults = self._config(data, options), self._config(data, {})
        for name in ("valid_error", "valid_loss"):
            if name in (table.metric, *table.also) and not config.valid_images:
                raise UserError(f"{name} is of held-out images; expected options: {{valid-images: N}}")
        identity = {
            name: one_number(value)
            for name, value in config.fixed().items()
            if name in ("data", "iterations") or value != getattr(defaults, name)
        }
        identity = json.loads(json.dumps({**identity, "data": self.data_name(data)}))
        name = f"{config.name()}-{config.iterations}"
        return Run("images", data, options, identity, name, config.iterations, "iterations"), []

    def _config(self, data: str, options: dict[str, Any]) -> Any:
        from fairseq_rskip.vision.config import parse

        return checked(parse, self._words(data, options), "")

    def _words(self, data: str, options: dict[str, Any]) -> list[str]:
        """Options as train_cifar.py takes them. Raises ``UserError`` for one that it does not have."""
        from fairseq_rskip.vision.config import Config

        fields, words = {name.replace("_", "-"): field for name, field in Config.__dataclass_fields__.items()}, []
        for name, value in options.items():
            if name in self.reserved or name not in fields:
                hint = did_you_mean(name, set(fields) - set(self.reserved))
                raise UserError(f"train_cifar.py takes no option {name!r} here; {hint} -h lists what it takes")
            default = fields[name].default
            if default is not None and isinstance(default, bool) != isinstance(value, bool):
                accepted = "true or false" if isinstance(default, bool) else "a value, not true or false"
                raise UserError(f"option {name!r} is {value!r}; expected {accepted}")
            if isinstance(value, bool):
                words += [] if value == default else [f"--no-{name}" if default else f"--{name}"]
            else:
                words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        return ["--data", data, *words]

    def whole_length(self, data: str, options: dict[str, Any]) -> tuple[int, str]:
        """The length of a run without --set."""
        return self._config(data, options).iterations, "iterations"

    def commands(self, run: Run) -> list[list[str]]:
        """The command lines that fill the folder of the run, which train_cifar.py names after the seed."""
        words = [*tool("train_cifar.py", "train-cifar"), *self._words(run.data, run.options)]
        return [[*words, "--seeds", str(run.seed), "--output", str(run.folder.parent), "--resume"]]

    def progress(self, run: Run) -> tuple[float, str]:
        """The part of the training that is done, from 0 to 1, and its losses."""
        try:
            records = [json.loads(line) for line in (run.folder / "log.jsonl").read_text("utf-8").splitlines()]
            last = {name: value for record in records for name, value in record.items()}
            loss = records[-1].get("train_loss_so_far", records[-1].get("train_loss"))
            said = [f"train loss {loss:.3f}"] if loss is not None else []
            said += [f"{k} error {last[f'{k}_error']:.2f} %" for k in ("valid", "test") if f"{k}_error" in last]
            return last["iteration"] / run.length, ", ".join(said)
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            return 0.0, ""

    def measure(self, run: Run) -> dict[str, Any] | None:
        """What a finished run gave: ``values`` by metric, and what else a report shows. None if it is not finished."""
        try:
            result = json.loads((run.folder / "result.json").read_text("utf-8"))
            values = {name: float(result[name]) for name in self.metrics if result.get(name) is not None}
            about = {name: result.get(name) for name in ("parameters", "train_seconds", "machine", "versions")}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return {"values": values, "unit": "% test error", **about} if "error" in values else None


class Translation:
    """Training by train.sh, beam search and scores by evaluate.sh."""

    metric, held_out, has_architectures = "sacreBLEU 13a", "valid_loss", True
    over_seeds = ("valid_loss", "last_valid_loss")
    metrics = {
        **dict.fromkeys([*(f"sacreBLEU {name}" for name in BLEUS), "chrF", "tokenised BLEU", "compound-split BLEU"], False),
        **dict.fromkeys(over_seeds, True),
    }
    weights = ("evaluation/averaged.pt", "checkpoints/checkpoint_best.pt", "checkpoints/checkpoint_last.pt")
    reserved = ("save-dir", "seed", "arch", "user-dir", "restore-file")
    # options that change nothing in what a run computes
    free = ("skip-log-interval", "log-interval", "num-workers", "tensorboard-logdir", "no-fp16")
    of_evaluate = ("average", "beam", "lenpen", "max-tokens", "cpu", "fp32")

    def find_data(self, data: str) -> str:
        """``data`` as train.sh takes it: the name of a corpus, or the path of a prepared folder. Raises ``UserError``."""
        path = Path(data).expanduser()
        if data not in NAMES and not path.is_dir():
            raise UserError(f"the data {data!r} is no prepared folder and none of {', '.join(NAMES)}")
        return data if data in NAMES else str(path.resolve())

    def data_name(self, data: str) -> str:
        """The corpus in ``data``, as its preparation.json says; a folder's own name if the project has no such corpus."""
        if data in NAMES or not Path(data).exists():  # your own text may still be unprepared
            return Path(data).name
        corpus = Corpus.find(data, must_exist=False)
        place = corpus.folder.resolve()
        name = (place.parent if place.name == "data-bin" else place).name
        return corpus.known or (f"folder {name}" if name in NAMES else name)

    def check_data(self, data: str) -> None:
        """Raise ``UserError`` for what train.sh or, hours later, evaluate.sh would refuse as not prepared."""
        Corpus.find(data, prepared=True).references("test")

    def make_run(self, table: Table, arch: str, data: str, options: dict[str, Any]) -> tuple[Run, list[str]]:
        """The run, without seed and folder, and warnings. Raises ``UserError`` as train.sh and evaluate.sh would."""
        for name, value in options.items():
            if name in self.reserved:
                raise UserError(f"option {name!r} cannot be given here: every run gets its own")
            if isinstance(value, list):
                raise UserError(f"option {name!r} is {value!r}; expected one value, text as fairseq-train has it")
        plan = planned(data, arch, tuple(as_words(options)))
        unit, length = plan.unit, plan.end
        corpus, scored = self.data_name(data), not set(self.over_seeds).issuperset([table.metric, *table.also])
        identity = {"data": corpus, "arch": arch, "unit": unit, "length": length}
        identity["options"] = {name: value for name, value in options.items() if name not in self.free}
        evaluate = self._evaluation(dashed(table.evaluate))
        identity.update({} if scored else {"scored": False}, **({"evaluate": evaluate} if evaluate else {}))
        weight = options.get("skip-lambda")
        name = "-".join(filter(None, [corpus, arch, f"lambda{weight}" if weight else "", str(length)]))
        return Run("translation", data, options, identity, name, length, unit, arch, scored, evaluate), plan.warnings

    def _evaluation(self, options: dict[str, Any]) -> dict[str, Any]:
        from fairseq_rskip.tools.evaluate.arguments import parse

        for name in options:
            if name not in self.of_evaluate:
                raise UserError(f"evaluate names {name!r}; expected {', '.join(self.of_evaluate)}")
        if options:
            checked(parse, ["DATA", "FOLDER", *as_words(options)])
        return options

    def whole_length(self, data: str, options: dict[str, Any]) -> tuple[int, str]:
        """The length of a run without --set."""
        from fairseq_rskip.tools.train.recipes import RECIPES

        ends = options if {"max-update", "max-epoch"} & set(options) else RECIPES.get(data, RECIPES["medium"]).options
        unit = "update" if ends.get("max-update") else "epoch"
        return int(ends.get(f"max-{unit}", 0)), f"{unit}s"

    def commands(self, run: Run) -> list[list[str]]:
        """The command lines that fill the folder of the run; evaluation only where a metric is of translations."""
        save, average = run.folder / CHECKPOINTS, run.evaluate.get("average", 0)
        words = [*as_words(run.options), "--seed", str(run.seed), "--save-dir", str(save)]
        train = [*tool("train.sh", "train"), run.data, run.arch, *words]
        data = run.data if Path(run.data).is_dir() else str(ROOT / "data" / run.data)
        ours = ["--out", str(run.folder / EVALUATION), *as_words(run.evaluate)]
        evaluate = [*tool("evaluate.sh", "evaluate"), data, str(save), *ours]
        for name in ("keep-interval-updates", "keep-last-epochs"):
            if average and name not in run.options:
                train += [f"--{name}", str(max(average, 10))]
        return [train, evaluate] if run.scored else [train]

    def progress(self, run: Run) -> tuple[float, str]:
        """The part of the training that is done, from 0 to 1, and its losses; all of it while it is evaluated."""
        newest = log.last(run.folder / CHECKPOINTS / "train.log")
        if not newest:
            return 0.0, ""
        done = max(record.updates if run.unit == "updates" else record.epoch - 1 for record in newest.values())
        if (run.folder / EVALUATION).is_dir():
            return 1.0, "evaluating"
        losses = {source.partition("_")[0]: record.values.get("loss") for source, record in newest.items()}
        said = [f"{name} loss {losses[name]:g}" for name in ("train", "valid") if losses.get(name) is not None]
        return min(1.0, done / max(1, run.length)), ", ".join(said)

    def measure(self, run: Run) -> dict[str, Any] | None:
        """``values`` by the names of scores and losses, and what else a report shows. None if it is not finished.

        valid_loss and last_valid_loss are the label-smoothed losses per token, in bits, of the held-out set.
        """
        losses = _held_out_losses(run.folder / CHECKPOINTS)
        about = {"parameters": _parameters(run.folder / CHECKPOINTS / "train.log")}
        versions = {"python": sys.version.split()[0], "fairseq": version("fairseq"), "torch": version("torch")}
        if not run.scored:
            return {"values": losses, **about, "versions": versions} if losses else None
        try:
            report = json.loads((run.folder / EVALUATION / "scores.json").read_text("utf-8"))
            scores = report["scores"]
            values = {row["name"]: float(row["score"]) for row in scores}
            about["length_ratio"] = next((row["length_ratio"] for row in scores if row.get("length_ratio")), None)
            about |= {"sentences": report["sentences"], "references": report["ref"], "unit": "BLEU"}
            about |= {"weights": report["evaluation"]["weights"], "examples": _examples(run, report["ref"][0])}
            versions |= report["evaluation"].get("versions", {})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        signatures = {row["name"]: row["signature"] for row in scores}
        return {"values": {**values, **losses}, "signatures": signatures, **about, "versions": versions}


@functools.cache  # rows of a table share much
def planned(data: str, arch: str, words: tuple[str, ...]) -> Any:
    """train.sh's own plan for these words. Raises ``UserError`` for what it refuses."""
    from types import SimpleNamespace

    from fairseq_rskip.tools.train.data import find_data
    from fairseq_rskip.tools.train.options import Options, check_arch, check_ranges, find_user_dir
    from fairseq_rskip.tools.train.recipes import GENERAL, RECIPES

    try:
        recipe = find_data(data, dry_run=True).recipe
    except UserError:
        recipe = GENERAL
    check_ranges(list(words))
    check_arch(arch, find_user_dir(list(words)))
    given = Options(arch, RECIPES[recipe].options, list(words)).given
    options = RECIPES[recipe].options
    ends = given if {"max_update", "max_epoch"} & set(given) else {k.replace("-", "_"): v for k, v in options.items()}
    unit = "update" if ends.get("max_update") else "epoch"
    warnings, warmup = [], given.get("warmup_updates", options["warmup-updates"])
    if unit == "update" and warmup * 2 > ends["max_update"]:
        warnings = [f"warmup-updates {warmup} is more than half of max-update {ends['max_update']}"]
    return SimpleNamespace(unit=f"{unit}s", end=int(ends.get(f"max_{unit}", 0)), warnings=warnings)


def _held_out_losses(folder: Path) -> dict[str, float]:
    """The lowest and the last loss on the held-out set, as fairseq keeps them in its last checkpoint.

    {} where a training chooses its best checkpoint by another metric than the loss.
    """
    from fairseq_rskip.safe_load import load_checkpoint

    try:
        checkpoint = load_checkpoint(folder / "checkpoint_last.pt", map_location="cpu")
        if checkpoint["cfg"]["checkpoint"]["best_checkpoint_metric"] != "loss":
            return {}
        state = checkpoint["extra_state"]
        found = {"valid_loss": state.get("best"), "last_valid_loss": state.get("val_loss")}
    except (UserError, OSError, KeyError, TypeError):
        return {}
    return {name: float(value) for name, value in found.items() if value is not None}


def _parameters(train_log: Path) -> int | None:
    """The number of trained parameters, as fairseq logs it."""
    with contextlib.suppress(OSError):
        found = re.search(r"num\. trained: ([\d,]+)", train_log.read_text("utf-8", "replace"))
        return int(found[1].replace(",", "")) if found else None
    return None


def _examples(run: Run, reference: str) -> list[dict[str, str]]:
    """Translations from the beginning, the middle and the end of the test set, with source and reference."""
    sides = {"reference": Path(reference), "translation": run.folder / EVALUATION / "hyp.txt"}
    source = Corpus.find(run.data).source
    if source and (text := Path(reference).with_suffix(f".{source}")).is_file():
        sides = {"source": text, **sides}
    lines = {name: read_lines(path) for name, path in sides.items()}
    count = len(lines["translation"])
    return [{name: lines[name][place * count // EXAMPLES] for name in lines} for place in range(EXAMPLES)]


TASKS = {"images": Images(), "translation": Translation()}
