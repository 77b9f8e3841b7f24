"""How far a training moved the matrices of a Transformer, and the λ that askip learned.

The page is docs/depth.md.

``python experiments/depth_weights.py LABEL=RUN ...`` takes runs of ``reproduce.py run depth``
(``runs/…/seed1``). Of the lower, middle and upper third of each side's layers
``results/depth_weights.csv`` has the means over the matrices of |W - W_0| / |W_0| (``moved``) and
|W| / |W_0| (``norm``); W_0 is drawn again from the run's seed. Of a run whose λ adapts
``results/depth_lambdas.csv`` has the λ of each block.
"""

from pathlib import Path

import pandas
from fairseq import checkpoint_utils, tasks, utils

import fairseq_rskip.models  # noqa: F401  (registers the architectures)
from fairseq_rskip.analysis import figures
from fairseq_rskip.console import Parser, label_and_path, print_line
from fairseq_rskip.errors import exit_status
from fairseq_rskip.residual.adaptive import lambdas

RESULTS = Path(__file__).resolve().parents[1] / "results"
THIRDS = ("lower", "middle", "upper")  # of the layers


def measure(label: str, run: Path) -> tuple[list[dict], list[dict]]:
    """A row for each matrix in a layer, and one for each λ that adapts."""
    state = checkpoint_utils.load_checkpoint_to_cpu(str(run / "checkpoints" / "checkpoint_last.pt"))
    cfg = state["cfg"]
    task = tasks.setup_task(cfg.task)
    utils.set_torch_seed(cfg.common.seed)
    model = task.build_model(cfg.model)
    start = {name: weight.double().clone() for name, weight in model.state_dict().items()}
    matrices = []
    for name, weight in state["model"].items():
        if weight.dim() != 2 or ".layers." not in name:
            continue
        side, _, layer, _ = name.split(".", 3)
        third = 3 * int(layer) // getattr(cfg.model, f"{side}_layers")
        size = start[name].norm()
        moved = float((weight.double() - start[name]).norm() / size)
        norm = float(weight.double().norm() / size)
        row = {"run": label, "side": side, "layers": THIRDS[third], "moved": moved, "norm": norm}
        matrices.append(row)

    model.load_state_dict(state["model"])
    coefficients = []
    for block, value in lambdas(model).items():
        coefficients.append({"run": label, "block": block, "lambda": f"{value:.3f}"})
    return matrices, coefficients


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN")
    matrices: list[dict] = []
    coefficients: list[dict] = []
    for argument in parser.parse_args().runs:
        label, run = label_and_path(argument)
        rows, learned = measure(label, Path(run))
        matrices += rows
        coefficients += learned
    means = (
        pandas.DataFrame(matrices)
        .groupby(["run", "side", "layers"], sort=False)
        .mean()
        .round(3)
        .reset_index()
    )
    print_line(means.to_string(index=False))
    figures.write_csv(RESULTS / "depth_weights.csv", means.to_dict("records"))
    if coefficients:
        figures.write_csv(RESULTS / "depth_lambdas.csv", coefficients)


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
