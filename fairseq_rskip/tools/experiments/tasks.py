"""What differs between tasks: checks, commands, files. A new task is a class here and an entry of ``TASKS``."""

import functools
import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fairseq_rskip.console import as_words, checked
from fairseq_rskip.errors import UserError, did_you_mean
from fairseq_rskip.files import read_json_lines
from fairseq_rskip.tools import log
from fairseq_rskip.tools.corpus import NAMES, ROOT, Corpus
from fairseq_rskip.tools.lines import read_lines
from fairseq_rskip.vision.options import DATA_SETS, FOLDER

from .records import Run, Table, dashed

CHECKPOINTS, EVALUATION = "checkpoints", "evaluation"  # folders of a translation run
RSKIP = [sys.executable, "-m", "fairseq_rskip.tools"]


class Task:
    """What all tasks share; ``names`` are data sets, any other data is a folder, after ``prefix`` on a command line."""

    names, prefix = NAMES, ""

    def find_data(self, data: str) -> str:
        """``data`` as the training command takes it. Raises ``UserError``."""
        path = Path(data.removeprefix(self.prefix)).expanduser()
        if data not in self.names and not path.is_dir():
            raise UserError(f"the data {data!r} is no folder and none of {', '.join(self.names)}")
        return data if data in self.names else f"{self.prefix}{path.resolve()}"

    def place(self, data: str) -> Path:
        """The folder of ``data``, of which a run's identity has only the name; a relative path if it is no folder."""
        return Path(data.removeprefix(self.prefix))

    def check_data(self, data: str) -> None:
        """Raise ``UserError`` for data that a run would not refuse at once, but after hours."""


class Images(Task):
    """Training by train_cifar.py."""

    names, prefix = DATA_SETS, FOLDER
    metric, held_out, has_architectures = "error", "valid_error", False  # held_out decides sweeps
    # metric -> whether lower is better
    metrics = dict.fromkeys(("error", "best_error", "test_loss", "train_loss", "valid_error", "valid_loss"), True)
    over_seeds = tuple(metrics)  # of a whole run; the others are of sentences
    weights = ("checkpoint.pt",)
    reserved = ("data", "seeds", "output", "resume")

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        """train_cifar.py's options; those with "free" in their metadata do not change results."""
        from fairseq_rskip.vision.config import Config

        return {name.replace("_", "-"): field for name, field in Config.__dataclass_fields__.items()}

    free = property(lambda self: [name for name, field in self.fields.items() if field.metadata.get("free")])

    def data_name(self, data: str) -> str:
        """The name of ``data`` in a report, and in what identifies a run: a folder's own name."""
        name = Path(data.removeprefix(FOLDER)).name
        return f"folder {name}" if data.startswith(FOLDER) and name in DATA_SETS else name

    def make_run(self, data: str, arch: str, options: dict[str, Any], table: Table) -> tuple[Run, list[str]]:
        """The run, without seed and folder, and warnings. Raises ``UserError`` as train_cifar.py would."""
        from fairseq_rskip.vision.config import parse

        config, defaults = (checked(parse, self._words(data, each)) for each in (options, {}))
        if "valid_error" in (table.metric, *table.also) and not config.valid_images:
            raise UserError("valid_error is of held-out images; set valid-images")
        settings = {k: v for k, v in config.fixed().items() if k in ("data", "iterations") or v != getattr(defaults, k)}
        settings = json.loads(json.dumps(dict(zip(settings, dashed(settings).values()))))  # tuples are lists
        identity, name = {**settings, "data": self.data_name(data)}, f"{config.name()}-{config.iterations}"
        return Run("images", data, options, identity, name, config.iterations, "iterations"), []

    def _words(self, data: str, options: dict[str, Any]) -> list[str]:
        """Options as train_cifar.py takes them. Raises ``UserError`` for one that it does not have."""
        words = ["--data", data]
        for name, value in options.items():
            if name not in self.fields:
                raise UserError(f"train_cifar.py has no option {name!r}; {did_you_mean(name, self.fields)}")
            default = self.fields[name].default
            if isinstance(value, bool) and isinstance(default, bool):
                words += [] if value == default else [f"--no-{name}" if default else f"--{name}"]
            else:
                words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        return words

    def commands(self, run: Run) -> list[list[str]]:
        """The command lines that fill the folder of the run, which train_cifar.py names after the seed."""
        words = [*RSKIP, "train-cifar", *self._words(run.data, run.options), "--seeds", str(run.seed)]
        return [[*words, "--output", str(run.folder.parent), "--resume"]]

    def progress(self, run: Run) -> tuple[float, str]:
        """The part of the training that is done, from 0 to 1, and its losses."""
        try:
            last = {k: value for record in read_json_lines(run.folder / "log.jsonl") for k, value in record.items()}
            names = ("train_loss_so_far", "train_loss", "valid_error", "test_error")
            return last["iteration"] / run.length, ", ".join(f"{n} {last[n]:.3f}" for n in names if n in last)
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0, ""

    def measure(self, run: Run) -> dict[str, Any] | None:
        """What a finished run gave: ``values`` by metric, and what else a report shows. None if it is not finished."""
        try:
            result = json.loads((run.folder / "result.json").read_text("utf-8"))
            values = {name: float(result[name]) for name in self.metrics if result.get(name) is not None}
            return {"values": values, "parameters": result.get("parameters"), "versions": result.get("versions")}
        except (OSError, ValueError, TypeError, AttributeError):
            return None


class Translation(Task):
    """Training by train.sh, beam search and scores by evaluate.sh."""

    name, of_text = "translation", False
    metric, held_out, has_architectures = "sacreBLEU 13a", "valid_loss", True
    losses = ("valid_loss", "last_valid_loss")  # label-smoothed, per token, in bits
    scores = ("sacreBLEU 13a", "sacreBLEU intl", "sacreBLEU intl lower-cased", "chrF")
    of_tokens = ("tokenised BLEU", "compound-split BLEU")  # of text that evaluate.sh does not keep
    metrics = {**dict.fromkeys((*scores, *of_tokens), False), **dict.fromkeys(losses, True)}
    over_seeds = (*losses, *of_tokens)
    weights = ("evaluation/averaged.pt", "checkpoints/checkpoint_best.pt", "checkpoints/checkpoint_last.pt")
    reserved = ("save-dir", "seed", "arch", "user-dir", "restore-file")
    free = ("skip-log-interval", "log-interval", "num-workers", "tensorboard-logdir")

    def data_name(self, data: str) -> str:
        """The corpus in ``data`` as its preparation.json says; of your own text, the folder's name."""
        corpus = Corpus.find(data, must_exist=False)
        place = corpus.folder.resolve()
        name = (place.parent if place.name == "data-bin" else place).name
        return corpus.known or (f"folder {name}" if name in NAMES else name)

    def place(self, data: str) -> Path:
        return Corpus.find(data, must_exist=False).folder.resolve()

    def check_data(self, data: str) -> None:  # evaluate.sh would refuse it
        Corpus.find(data, prepared=True).references("test")

    def make_run(self, data: str, arch: str, options: dict[str, Any], table: Table) -> tuple[Run, list[str]]:
        """The run, without seed and folder, and warnings. Raises ``UserError`` as train.sh and evaluate.sh would."""
        from fairseq_rskip.tools.evaluate.main import parse

        for name, value in options.items():
            if isinstance(value, list):
                raise UserError(f"option {name!r} is {value!r}; expected one value, text as fairseq-train has it")
        plan = planned(data, arch, tuple(as_words(options)))
        if plan.corpus.is_text != self.of_text:
            raise UserError(f"task {self.name} with {data}: expected {'a text' if self.of_text else 'two languages'}")
        scored = not set(self.losses).issuperset([table.metric, *table.also])
        evaluate, corpus = dashed(table.evaluate), self.data_name(data)
        if evaluate:
            checked(parse, ["DATA", "FOLDER", *as_words(evaluate)])
        identity = {"data": corpus, "arch": arch, "unit": plan.unit, "length": plan.end}
        identity["options"] = {name: value for name, value in options.items() if name not in self.free}
        identity |= ({} if scored else {"scored": False}) | ({"evaluate": evaluate} if evaluate else {})
        weight = f"lambda{options['skip-lambda']}" if options.get("skip-lambda") else ""
        name = "-".join(filter(None, [corpus, arch, weight, str(plan.end)]))
        run = Run(self.name, data, options, identity, name, plan.end, plan.unit, arch, scored, evaluate)
        return run, plan.warnings

    def commands(self, run: Run) -> list[list[str]]:
        """The command lines that fill the folder of the run; evaluation only where a metric is of translations."""
        save, options = run.folder / CHECKPOINTS, dict(run.options)
        if average := run.evaluate.get("average"):  # training keeps as many checkpoints
            for name in ("keep-interval-updates", "keep-last-epochs"):
                options.setdefault(name, max(average, 10))
        options |= {"seed": run.seed, "save-dir": save}
        train = [*RSKIP, "train", run.data, run.arch, *as_words(options)]
        data = run.data if Path(run.data).is_dir() else str(ROOT / "data" / run.data)
        ours = [*as_words(run.evaluate), "--out", str(run.folder / EVALUATION)]
        return [train, [*RSKIP, "evaluate", data, str(save), *ours]][: 1 + run.scored]

    def progress(self, run: Run) -> tuple[float, str]:
        """As that of images."""
        if (run.folder / EVALUATION).is_dir():
            return 1.0, "evaluating"
        newest = log.last(run.folder / CHECKPOINTS / "train.log")
        done = max((x.updates if run.unit == "updates" else x.epoch - 1 for x in newest.values()), default=0)
        return min(1.0, done / max(1, run.length)), log.summary(newest)

    def measure(self, run: Run) -> dict[str, Any] | None:
        """``values`` by the names of scores and losses, and what else a report shows. None if it is not finished."""
        save, measured = run.folder / CHECKPOINTS, {"values": _held_out_losses(run.folder / CHECKPOINTS)}
        size = re.search(r"num\. trained: ([\d,]+)", (save / "train.log").read_text("utf-8", "replace"))
        measured["parameters"] = int(size[1].replace(",", "")) if size else None
        measured["versions"] = {name: version(name) for name in ("fairseq", "torch")}
        if not run.scored:
            return measured if measured["values"] else None
        try:
            report = json.loads((run.folder / EVALUATION / "scores.json").read_text("utf-8"))
            self.read_scores(run, report, measured)
            return {**measured, "weights": report["evaluation"]["weights"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def read_scores(self, run: Run, report: dict[str, Any], measured: dict[str, Any]) -> None:
        """Add what the evaluation's ``report`` says to what :meth:`measure` has ``measured``."""
        for row in report["scores"]:
            measured["values"][row["name"]] = float(row["score"])
            measured.setdefault("signatures", {})[row["name"]] = row["signature"]
            measured["length_ratio"] = row.get("length_ratio") or measured.get("length_ratio")
        measured |= {"references": report["ref"], "examples": _examples(run, Path(report["ref"][0]))}


class LanguageModel(Translation):
    """Training by train.sh on a text, perplexity by evaluate.sh."""

    name, of_text = "language-model", True
    metric = "perplexity"  # per subword
    metrics = dict.fromkeys(("perplexity", "perplexity per word", "bits per byte", *Translation.losses), True)
    over_seeds = tuple(metrics)

    def read_scores(self, run: Run, report: dict[str, Any], measured: dict[str, Any]) -> None:
        values = (report["perplexity"]["subword"], report["perplexity"]["word"], report["bits"]["byte"])
        measured["values"] |= dict(zip(self.metrics, map(float, values)))


@functools.cache  # rows of a table share much
def planned(data: str, arch: str, words: tuple[str, ...]) -> Any:
    """train.sh's own plan for these words. Raises ``UserError`` for what it refuses."""
    from fairseq_rskip.tools.train import main, plan

    return plan.make_plan(*main.read([data, arch, "--dry-run", *words]))


def _held_out_losses(folder: Path) -> dict[str, float]:
    """The lowest and the last loss on the held-out set, of fairseq's last checkpoint; {} if it has another metric."""
    from fairseq_rskip.safe_load import load_checkpoint

    try:
        checkpoint = load_checkpoint(folder / "checkpoint_last.pt", map_location="cpu")
        if checkpoint["cfg"]["checkpoint"]["best_checkpoint_metric"] != "loss":
            return {}
        names = {"valid_loss": "best", "last_valid_loss": "val_loss"}
        return {name: float(checkpoint["extra_state"][key]) for name, key in names.items()}
    except (UserError, OSError, KeyError, TypeError):
        return {}


def _examples(run: Run, reference: Path) -> list[dict[str, str]]:
    """Translations from the beginning, the middle and the end of the test set, with source and reference."""
    source = reference.with_suffix(f".{Corpus.find(run.data).source}")
    paths = {"source": source, "reference": reference, "translation": run.folder / EVALUATION / "hyp.txt"}
    lines = {name: read_lines(path) for name, path in paths.items() if path.is_file()}
    count = len(lines["translation"])
    return [{name: each[place * count // 3] for name, each in lines.items()} for place in range(3)]


TASKS = {"images": Images(), "translation": Translation(), "language-model": LanguageModel()}
