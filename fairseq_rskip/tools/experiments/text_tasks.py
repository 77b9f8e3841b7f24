"""Translation and language models as tasks of ``rskip run``: checks, commands and files."""

import functools
import hashlib
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fairseq_rskip.console import to_argv
from fairseq_rskip.errors import UserError, did_you_mean
from fairseq_rskip.machine import fairseq_version
from fairseq_rskip.tools import comet, training_files
from fairseq_rskip.tools.corpus import DATA, NAMES, PREPARATION, Corpus, folder_name
from fairseq_rskip.tools.evaluate.scores_file import TRANSLATION, read_scores
from fairseq_rskip.tools.lines import read_lines

from .records import Cell, Experiment, Run
from .run_folder import LOSSES, has_checkpoints
from .task import RSKIP, Task, own_rule


class Translation(Task):
    """Training by train.sh, beam search and scores by evaluate.sh."""

    meanings = dict.fromkeys(
        LOSSES,
        "in bits per token, label smoothing included; 2 to its power is therefore above the "
        "perplexity",
    )

    name = "translation"
    is_monolingual = False  # whether the corpus has one language
    metric = "sacreBLEU 13a"
    held_out = "valid_loss"
    has_architectures = True
    losses = LOSSES  # label-smoothed
    on_text = ("sacreBLEU 13a", "sacreBLEU intl", "sacreBLEU intl lower-cased", "chrF", "chrF++")
    # evaluate.sh does not keep the tokens
    on_tokens = ("tokenised BLEU", "tokenised BLEU lower-cased", "compound-split BLEU")
    metrics = {
        **dict.fromkeys((*on_text, *on_tokens, comet.NAME), False),
        **dict.fromkeys(losses, True),
    }
    over_seeds = (*losses, *on_tokens, comet.NAME)
    weights = ("checkpoints/checkpoint_best.pt", "checkpoints/checkpoint_last.pt")
    parent = "finetune-from-model"
    reserved = ("save-dir", "seed", "arch", "user-dir", "restore-file")
    free = ("skip-log-interval", "log-interval", "num-workers", "tensorboard-logdir")

    def data_name(self, data: str) -> str:
        """As in the base class; of a published corpus the name in its preparation.json."""
        corpus = Corpus.find_or_plan(data)
        if corpus.known:
            return corpus.known
        name = folder_name(corpus.folder)
        return f"folder {name}" if name in NAMES else name

    def data_folder(self, data: str) -> Path:
        return Corpus.find_or_plan(data).folder.resolve()

    def has_one_language(self, data: str) -> bool:
        """Whether ``data`` is known to be of one language."""
        try:
            return Corpus.find_or_plan(data).is_monolingual
        except UserError:
            return False

    def check_data(self, data: str) -> None:  # evaluate.sh would refuse it
        Corpus.find_for_evaluation(data).references("test")

    def make_run(self, data: str, cell: Cell, experiment: Experiment) -> tuple[Run, list[str]]:
        _check_single_values(cell.options)
        plan = planned(data, cell.arch, tuple(to_argv(cell.options)))
        self._check_plan(plan, cell)
        metrics = {experiment.metric, *experiment.table.also}
        _check_metrics(metrics, cell.evaluate, self.is_monolingual)
        self._check_held_out(metrics, cell)

        corpus = Path(data).name if data in experiment.texts else self.data_name(data)
        run = Run(
            task=self.name,
            data=data,
            options=cell.options,
            identity=self._identity(corpus, cell, plan),
            name=_run_name(corpus, cell, plan),
            length=plan.end,
            unit=plan.unit,
            arch=cell.arch,
            scored=not metrics.issubset(self.losses),
            evaluate=cell.evaluate,
            averaged=_most_averaged(experiment),
        )
        return run, plan.warnings

    def data_checksum(self, data: str) -> str:
        """Of the dictionaries, which count the words of the training text, and of the numbers of
        sentences and tokens; "" for a corpus that is not prepared.
        """
        try:
            folder = Corpus.find(data).folder
        except UserError:
            return ""
        digest = hashlib.sha256()
        for path in sorted([*folder.glob("dict*.txt"), *folder.glob(PREPARATION)]):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def _check_plan(self, plan: Any, cell: Cell) -> None:
        """Raise ``UserError`` for a model of another task, or an option that cannot be unset."""
        if plan.corpus.is_monolingual != self.is_monolingual:
            kind = "a language model" if plan.corpus.is_monolingual else "a translation model"
            raise UserError(f"{cell.arch} is {kind}: the task of this table is {self.name}")
        for name, value in cell.options.items():
            if value is False and name in plan.switches:
                raise UserError(
                    f"option {name!r} is false, but {cell.arch}, the recipe or this machine sets "
                    "it, and fairseq-train cannot unset it: expected no such line (for fp16: "
                    "no-fp16), or an architecture without it, as transformer_skip with skip-kind"
                )

    def _check_held_out(self, metrics: set[str], cell: Cell) -> None:
        """Raise ``UserError`` where the held-out loss is needed and the checkpoint has none."""
        option = "best-checkpoint-metric"
        chosen_by = cell.options.get(option, "loss")
        needs_loss = cell.sweep or metrics.intersection(self.losses)
        if chosen_by != "loss" and needs_loss:
            raise UserError(
                f"option {option!r} is {chosen_by!r}: a sweep, and the metrics "
                f"{' and '.join(self.losses)}, need the held-out loss; expected no such option"
            )

    def _identity(self, corpus: str, cell: Cell, plan: Any) -> dict[str, Any]:
        """What distinguishes the training from others."""
        fixed = {name: value for name, value in cell.options.items() if name not in self.free}
        return {
            "data": corpus,
            "arch": cell.arch,
            "unit": plan.unit,
            "length": plan.end,
            "options": fixed,
            **own_rule(cell.arch, cell.options),
        }

    def commands(self, run: Run) -> list[list[str]]:
        """Those of the training, and of the evaluation if the run is scored."""
        save = run.folder / training_files.CHECKPOINTS
        options = dict(run.options)
        if run.averaged:  # training keeps as many checkpoints, for rows that share it, too
            for name in ("keep-interval-updates", "keep-last-epochs"):
                options.setdefault(name, max(run.averaged, 10))
        options |= {"seed": run.seed, "save-dir": save}
        train = [*RSKIP, "train", run.data, run.arch, "--model-checked", *to_argv(options)]
        if not run.scored:
            return [train]

        data = run.data if Path(run.data).is_dir() else str((DATA / run.data).absolute())
        evaluate = [*RSKIP, "evaluate", data, str(save), *to_argv(run.evaluate)]
        evaluate += ["--out", str(run.folder / run.evaluation)]
        return [train, evaluate]

    def progress(self, run: Run) -> tuple[float, str]:
        if has_checkpoints(run.folder) and (run.folder / run.evaluation).is_dir():
            return 1.0, "evaluating"

        done = 0
        newest = training_files.last(run.folder / training_files.CHECKPOINTS / training_files.LOG)
        for record in newest.values():
            if run.unit == "updates":
                done = max(done, record.updates)
            else:
                epoch_is_over = record.source == "train"
                done = max(done, record.epoch if epoch_is_over else record.epoch - 1)
        return min(1.0, done / max(1, run.length)), training_files.summary(newest)

    def measure(self, run: Run) -> dict[str, Any] | None:
        """As in the base class; the metrics of a training are its held-out losses."""
        save = run.folder / training_files.CHECKPOINTS
        values = _held_out_losses(save)
        if not values and not run.scored:
            return None
        text = (save / training_files.LOG).read_text("utf-8", "replace")
        size = re.search(r"num\. trained: ([\d,]+)", text)
        return {
            "values": values,
            "parameters": int(size[1].replace(",", "")) if size else None,
            "versions": {"fairseq": fairseq_version(), "torch": version("torch")},
            "computed": _how_computed(text),
        }

    def scores(self, run: Run) -> dict[str, Any] | None:
        try:
            report = read_scores(run.folder / run.evaluation)
            weights = report["evaluation"]["weights"]
            return {**self.read_scores(run, report), "weights": weights}
        except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def read_scores(self, run: Run, report: dict[str, Any]) -> dict[str, Any]:
        """The entries of the evaluation's ``report`` that :meth:`scores` returns."""
        values, signatures, length_ratios = {}, {}, {}
        for row in report["scores"]:
            values[row["name"]] = float(row["score"])
            signatures[row["name"]] = row["signature"]
            length_ratios[row["name"]] = row.get("length_ratio")
        return {
            "values": values,
            "signatures": signatures,
            "length_ratio": length_ratios.get(Translation.metric),
            "degenerate": report.get("degenerate", ""),
            "references": report["ref"],
            "examples": _examples(run, Path(report["ref"][0])),
        }


def _how_computed(log: str) -> str:
    """Precision and device of a training, by the command in its log: ``fp16 on CUDA``.

    A training that was resumed in another way has both, ``fp16 on CUDA / fp32 on a CPU``.
    """
    ways = []
    for command in log.splitlines():
        # only the commands: fairseq's own lines name options that are not in use ("try --fp16")
        if "fairseq-train " not in command:
            continue
        precision = re.search(r" --(?:memory-efficient-)?(fp16|bf16|amp)\b", command)
        device = "a CPU" if re.search(r" --cpu\b", command) else "CUDA"
        ways.append(f"{precision[1] if precision else 'fp32'} on {device}")
    return " / ".join(dict.fromkeys(ways))


class LanguageModel(Translation):
    """Training by train.sh on a text, perplexity by evaluate.sh."""

    name = "language-model"
    meanings = {
        **dict.fromkeys(
            LOSSES, "the cross-entropy in bits per subword; 2 to its power is the perplexity"
        ),
        "perplexity": "of the test text, per subword",
        "perplexity per word": "of the test text",
        "bits per byte": "of the test text",
    }
    is_monolingual = True
    metric = "perplexity"  # per subword
    metrics = dict.fromkeys(
        ("perplexity", "perplexity per word", "bits per byte", *Translation.losses), True
    )
    over_seeds = tuple(metrics)

    def read_scores(self, run: Run, report: dict[str, Any]) -> dict[str, Any]:
        values = {
            "perplexity": float(report["perplexity"]["subword"]),
            "perplexity per word": float(report["perplexity"]["word"]),
            "bits per byte": float(report["bits"]["byte"]),
        }
        return {"values": values}


def _check_single_values(options: dict[str, Any]) -> None:
    """Raise ``UserError`` for an option whose value is a list."""
    for name, value in options.items():
        if isinstance(value, list):
            raise UserError(
                f"option {name!r} is {value!r}; expected one value, text as fairseq-train has it"
            )


def _check_metrics(metrics: set[str], evaluate: dict[str, Any], is_monolingual: bool) -> None:
    """Raise ``UserError`` for COMET without its model, and for what evaluate.sh refuses."""
    if comet.NAME in metrics and "comet" not in evaluate:
        raise UserError(f"{comet.NAME} needs its model: set evaluate: {{comet: MODEL}}")
    if evaluate:
        check_evaluation(tuple(to_argv(evaluate)), is_monolingual)


def _run_name(corpus: str, cell: Cell, plan: Any) -> str:
    """The training's identity, readable and shorter."""
    parts = [corpus, cell.arch]
    if cell.options.get("skip-lambda"):
        parts.append(f"lambda{cell.options['skip-lambda']}")
    parts.append(str(plan.end))
    return "-".join(filter(None, parts))


@functools.cache  # rows of a table share much
def planned(data: str, arch: str, words: tuple[str, ...]) -> Any:
    """train.sh's own plan for these words. Raises ``UserError`` for what it refuses.

    The run's process plans once more, because the command depends on the GPUs that it sees; it does
    not build the small model again. fairseq-train parses the command, which it alone executes.
    """
    from fairseq_rskip.tools.train import main, plan

    return plan.make_plan(*main.read([data, arch, "--dry-run", *words]))


@functools.cache  # the rows of a table share their evaluation
def check_evaluation(words: tuple[str, ...], is_monolingual: bool) -> None:
    """Raise ``UserError`` for options that evaluate.sh refuses."""
    from fairseq_rskip.tools.evaluate.main import check_kind_of_data, make_parser

    parser = make_parser()
    known = [option.removeprefix("--") for option in parser.option_strings if option != "--out"]
    for word in words:
        name = word.removeprefix("--")
        if word.startswith("--") and name not in known:
            hint = did_you_mean(name, known, f"expected {', '.join(known)}")
            raise UserError(f"evaluate has no option {name!r}; {hint}")
    try:
        check_kind_of_data(parser.parse_args(["DATA", "FOLDER", *words]), is_monolingual)
    except UserError as error:
        raise UserError(f"evaluate: {error}") from None


def _most_averaged(experiment: Experiment) -> int:
    """The most checkpoints that the evaluation of a row of the table averages, chosen or not.

    0 if none says how many. A row whose number is wrong is refused where it is planned.
    """
    table = experiment.table
    numbers = [part.evaluate.get("average") for part in (table, *table.rows)]
    return max([number for number in numbers if type(number) is int and number > 0], default=0)


def _held_out_losses(folder: Path) -> dict[str, float]:
    """The lowest and the last held-out loss, from fairseq's last checkpoint.

    {} if checkpoints are chosen by another metric.
    """
    from fairseq_rskip.safe_load import load_checkpoint

    try:
        checkpoint = load_checkpoint(folder / training_files.LAST, map_location="cpu")
        if checkpoint["cfg"]["checkpoint"]["best_checkpoint_metric"] != "loss":
            return {}
        names = {"valid_loss": "best", "last_valid_loss": "val_loss"}
        return {name: float(checkpoint["extra_state"][key]) for name, key in names.items()}
    except (UserError, OSError, KeyError, TypeError):
        return {}


def _examples(run: Run, reference: Path) -> list[dict[str, str]]:
    """Three translations, spread over the test set, with source and reference."""
    source = reference.with_suffix(f".{Corpus.find(run.data).source}")
    paths = {
        "source": source,
        "reference": reference,
        "translation": run.folder / run.evaluation / TRANSLATION,
    }
    lines = {name: read_lines(path) for name, path in paths.items() if path.is_file()}
    count = len(lines["translation"])
    examples = []
    for number in (0, count // 3, 2 * count // 3):
        examples.append({name: each[number] for name, each in lines.items()})
    return examples
