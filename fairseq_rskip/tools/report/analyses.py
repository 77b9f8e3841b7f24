"""Figures that scripts/analyze.py draws of a table's finished runs, drawn again only when something has changed."""

import contextlib
import hashlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Optional

from fairseq_rskip.analysis.figures import ENDINGS
from fairseq_rskip.files import write_text
from fairseq_rskip.tools.console import print_line
from fairseq_rskip.tools.reproduce.execution import last_error
from fairseq_rskip.tools.reproduce.tables import ROOT
from fairseq_rskip.tools.reproduce.translation import CHECKPOINTS, EVALUATION
from fairseq_rskip.vision.run import CHECKPOINT

from .figures import Figure
from .numbers import Line, Result

SCRIPT = ROOT / "scripts" / "analyze.py"
CURVES = "curves"
TITLES = {
    "gradients": "Gradient norm at the output of every residual block",
    "ratio": "x:F in the output of every residual block, and effective scale",
    CURVES: "Learning curves",
}
ABOUT = "figures/{}, made with analyze.py by hand; its conditions are not recorded here."
WEIGHTS = (f"{EVALUATION}/averaged.pt", f"{CHECKPOINTS}/checkpoint_best.pt", f"{CHECKPOINTS}/checkpoint_last.pt")


def draw(result: Result, folder: Path, examples: Optional[int]) -> List[Figure]:
    """The figures of the table's finished runs, in ``folder``: the one that its YAML file names, and curves."""
    lines = _different(result.lines)
    if not lines:
        return []
    drawn = []
    for name in dict.fromkeys(filter(None, (result.table.figure, CURVES))):
        options = dict(result.table.figure_options) if name == result.table.figure else {}
        if name != CURVES and examples:
            options["examples"] = examples
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        models = _seeds(lines) if name == CURVES else _first_seeds(lines)
        stem = folder / f"{result.plan.name}-{name}"
        command = [sys.executable, str(SCRIPT), name, "--output", str(stem), *words, *models]
        about = "All finished seeds." if name == CURVES else "The first finished seed of each row."
        figure = Figure(stem, TITLES[name], about, f"{TITLES[name]}: {', '.join(map(label, lines))}")
        drawn.append(_drawn(figure, command, _key(command, lines)))
    return drawn


def _drawn(figure: Figure, command: List[str], key: str) -> Figure:
    """``figure``, made with ``command`` unless it is there already, from the same runs with the same options."""
    mark, log = figure.file(".key"), figure.file(".log")
    if mark.exists() and mark.read_text("utf-8") == key and all(figure.file(ending).exists() for ending in ENDINGS):
        return figure
    with contextlib.suppress(FileNotFoundError):
        mark.unlink()
    said = shlex.join(command)
    print_line(f"drawing {figure.stem.name} (what it says goes to {log})")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        output.write(f"== {said}\n".encode())
        output.flush()
        status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT).returncode
    problem = last_error(log, 0) if status else ""
    lacking = [ending for ending in ENDINGS if not figure.file(ending).exists()]
    if lacking and not problem:
        problem = f"it ended well, and left no {lacking[0]} file"
    if problem:
        print_line(f"{figure.stem.name} could not be drawn: {problem}")
        return figure._replace(problem=problem, command=said)
    write_text(mark, key)
    return figure


def _key(command: List[str], lines: List[Line]) -> str:
    results = [line.metrics for line in lines]
    return hashlib.sha256(json.dumps([command[1:], results]).encode()).hexdigest() + "\n"


def label(line: Line) -> str:
    """What the row is called on the figure; analyze.py ends a label at the first "="."""
    return (line.label + (f" / {line.column}" if line.column else "")).replace("=", ":")


def _different(lines: List[Line]) -> List[Line]:
    """The lines with finished runs; of those that share them the first."""
    found: Dict[str, Line] = {}
    for line in lines:
        if line.folders:
            found.setdefault(str(sorted(map(str, line.folders.values()))), line)
    return list(found.values())


def _seeds(lines: List[Line]) -> List[str]:
    """Every finished seed, those of a row under the same label; a translation's log is with its checkpoints."""
    folders = [(line, folder) for line in lines for folder in line.folders.values()]
    return [f"{label(line)}={_existing(folder, [CHECKPOINTS])}" for line, folder in folders]


def _first_seeds(lines: List[Line]) -> List[str]:
    """The weights of one run a row: a ResNet's folder, the translation model that was evaluated."""
    first = [(line, next(iter(line.folders.values()))) for line in lines]
    return [f"{label(line)}={_weights(folder)}" for line, folder in first]


def _weights(folder: Path) -> Path:
    return folder if (folder / CHECKPOINT).exists() else _existing(folder, WEIGHTS)


def _existing(folder: Path, names: List[str]) -> Path:
    return next((folder / name for name in names if (folder / name).exists()), folder)


def found(folder: Path) -> List[Figure]:
    """The figures that somebody has put into ``folder`` with analyze.py."""
    return [
        Figure(path.with_name(path.name[: -len(".png")]), path.name[: -len(".png")], ABOUT.format(path.name), path.name)
        for path in sorted(folder.glob("*.png"))
    ]
