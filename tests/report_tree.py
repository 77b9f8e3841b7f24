"""Run folders as reproduce.py leaves them, written by hand, and the report of them."""

import csv
import functools
import json

import pytest
import yaml

from fairseq_rskip.tools.report import main as reporting_main
from fairseq_rskip.tools.reproduce import options, plans, runs
from fairseq_rskip.tools.reproduce.plans import Plan
from fairseq_rskip.tools.reproduce.results import collect
from fairseq_rskip.tools.reproduce.tables import load

SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:intl|smooth:exp|version:2.6.0"
KINDS = {
    "1xSkip": ("xskip", 1, "none"),
    "2xSkip": ("xskip", 2, "none"),
    "1xSkip+LN": ("xskip", 1, "layer"),
    "2rSkip+LN": ("rskip", 2, "layer"),
}
ROWS = [{"label": label, "equation": f"eq {label}", "reported": 6.0 + n} for n, label in enumerate(KINDS)]


def image_settings(label, depth=110, iterations=64000):
    kind, scale, norm = KINDS[label]
    words = {"skip_kind": kind, "skip_lambda": scale, "skip_norm": norm}
    return {
        "data": "cifar10",
        "depth": depth,
        **words,
        "iterations": iterations,
        "warmup_iterations": iterations // 160,
    }


def translation_settings(label, data="iwslt15-en-vi"):
    return {"data": data, "arch": f"arch_{label.replace('+', '_')}", "options": {}, "unit": "updates", "length": 100}


class Tree:
    """An output folder and a folder of tables; ``table`` and ``plan`` fill them, ``finish`` and ``fail`` do runs."""

    def __init__(self, folder):
        self.out, self.experiments = folder / "runs of mine", folder / "experiments"
        self.experiments.mkdir(parents=True)
        self.tables = {}

    def table(self, name="table1", task="images", rows=ROWS, **more):
        images = task == "images"
        about = {
            "title": "Skip constructions, PreAct-ResNet",
            "source": "Liu et al. 2020, Table 1",
            "task": task,
            "metric": "error" if images else "sacreBLEU intl",
            "data": "cifar10" if images else "iwslt15-en-vi",
            "seeds": [1, 2, 3],
            "baseline": rows[0]["label"],
            "rows": [row if images else {"arch": "a", **row} for row in rows],
        }
        path = self.experiments / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**about, **more}, allow_unicode=True), encoding="utf-8")
        self.tables[name] = load(path)
        return self.tables[name]

    def plan(self, table="table1", settings=None, seeds=(1, 2, 3), **more):
        task = self.tables[table].task
        make = image_settings if task == "images" else translation_settings
        settings = settings or {(row.label, ""): make(row.label) for row in self.tables[table].rows}
        fields = {"data": "", "scale": 1.0, "changed": {}, "name": table, **more}
        plan = Plan(table=table, seeds=list(seeds), settings=settings, **fields)
        plans.save(plan, self.out)
        return plan

    def folder(self, plan, label, seed, column=""):
        folder = plans.run_folder(self.out, self.tables[plan.table].task, plan.settings[label, column], seed)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def finish(self, plan, label, values, column="", unit="% test error", metric="error"):
        """Runs of a row that are done: ``values`` by seed."""
        for seed, value in values.items():
            folder = self.folder(plan, label, seed, column)
            write_json(folder / runs.METRICS, {"values": {metric: value}, "unit": unit})
            versions = {"fairseq_rskip": "9.9", "torch": "2.14"}
            write_json(folder / runs.RUN, {"versions": versions, "git": "0123456789abcdef+changes"})
            records = [{"iteration": n, "train_loss": 2.0 / n, "test_error": 50.0 / n} for n in (1, 2, 3)]
            (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def translate(self, plan, label, seed, hypotheses, references, score, signature=SIGNATURE):
        """A translation that is done: its text, and the path of its references."""
        folder = self.folder(plan, label, seed)
        (folder / "evaluation").mkdir()
        (folder / "evaluation" / "hyp.txt").write_text("\n".join(hypotheses) + "\n", encoding="utf-8")
        about = {"values": {"sacreBLEU intl": score}, "signatures": {"sacreBLEU intl": signature}, "unit": "BLEU"}
        write_json(folder / runs.METRICS, {**about, "references": [str(references)]})

    def fail(self, plan, label, seed, error):
        write_json(self.folder(plan, label, seed) / runs.FAILED, {"error": error})

    def report(self, *words, compare=False):
        """Write the report in this process; returns its folder. ``compare``: the plan's settings with the table's."""
        argv = ["report", "--output", str(self.out), "--experiments", str(self.experiments), *map(str, words)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reporting_main, "collect", functools.partial(collect, compare=compare))
            assert reporting_main.write_report(options.parse(argv)) == 0
        return self.out / "report"

    def records(self):
        """report.csv, by row and column."""
        with open(self.out / "report" / "report.csv", encoding="utf-8", newline="") as file:
            return {(record["row"], record["column"]): record for record in csv.DictReader(file)}


def write_json(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def markdown_rows(text):
    """The cells of every line of Markdown tables, by the first one."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    split = [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]
    return {cells[0].strip(): cells[1:] for cells in split}
