"""How the streams of hyper-connections and their relatives differ, mix and learn.

For H, the n streams that enter a block at one position: the effective number of streams is
``exp(-sum_k p_k log p_k)``, p the eigenvalues of the n x n matrix of their inner products, over
their sum: 1 if all streams are parallel, n if they are orthogonal and of one length. The dominant
stream's share is the largest ``|h_i|^2`` over the sum of all. The distance of the mixing matrix R
from the identity is ``|R - I| / sqrt(n)``, in Frobenius' norm, and from its start the same with the
matrix of a fresh copy of the rule in place of I. All are means over the positions of examples,
padding left out. What a parameter moved is measured against that copy, too.
"""

from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..residual import SkipConnection, skips
from . import figures
from .figures import Row
from .probe import Call, Watch, example_mean
from .study import Quantity, Study, estimate

NUMBER = Quantity(
    "effective_streams", "effective_streams_error", "effective number of streams", shows=(0.0, 2.0)
)
SHARE = Quantity(
    "dominant_share", "dominant_share_error", "the dominant stream's share", shows=(0.0, 1.0)
)
DISTANCE = Quantity(
    "distance",
    "distance_error",
    "distance of the mixing matrix from the identity",
    shows=(0.0, 0.1),
)
MOVED = Quantity(
    "moved", "moved_error", "distance of the mixing matrix from its start", shows=(0.0, 0.1)
)
QUANTITIES = (NUMBER, SHARE, DISTANCE, MOVED)
LONG = 100  # updates after which a training is warned of streams that do not differ
STILL = 1e-6  # a change of a parameter below this share of its size, or of 1, is none
COLLAPSED = 1.05  # effective streams
DOMINANT = 0.9  # the share of a stream beside which the others do not count


class StreamProbe(Watch):
    """Measures, in a ``with`` block, the input streams of every skip connection with several.

    ``starts``: module name -> the skip connection as it was before the training. The distance of
    the mixing matrix from its start is measured where it is given.
    """

    def __init__(self, model: nn.Module, starts: dict[str, SkipConnection] | None = None):
        super().__init__(model)
        self.starts = starts or {}

    @torch.no_grad()
    def see(self, name: str, skip: SkipConnection, call: Call) -> None:
        streams = skip.streams(call.x)
        if streams is None:
            return
        h, matrix = (tensor.double() for tensor in streams)
        values = {
            NUMBER.column: effective_number(h),
            SHARE.column: dominant_share(h),
            DISTANCE.column: distance_from_identity(matrix).expand(h.shape[:-2]),
        }
        if name in self.starts:
            start = self.starts[name].to(call.x.device).streams(call.x)
            assert start is not None
            values[MOVED.column] = distance(matrix, start[1].double()).expand(h.shape[:-2])
        means = {
            column: example_mean(skip, value.unsqueeze(-1), call.mask).cpu()
            for column, value in values.items()
        }
        self.blocks[name].passes.append(means)

    def columns(self, name: str) -> Row | None:
        """The means over examples at the skip connection ``name``, and their errors.

        None if it has one stream.
        """
        passes = self.blocks[name].passes
        if not passes:
            return None
        row: Row = {}
        for quantity in QUANTITIES:
            if quantity.column in passes[0]:
                values = torch.cat([each[quantity.column] for each in passes])
                row[quantity.column], row[quantity.error] = estimate(values)
        return row


def effective_number(h: Tensor) -> Tensor:
    """The effective number of streams of H ``(..., n, dim)``: ``(...)``, from 1 to n."""
    eigenvalues = torch.linalg.eigvalsh(h @ h.transpose(-1, -2)).clamp(min=0.0)
    shares = eigenvalues / eigenvalues.sum(-1, keepdim=True).clamp(min=1e-300)
    return torch.special.entr(shares).sum(-1).exp()


def dominant_share(h: Tensor) -> Tensor:
    """The largest share of a stream in the squares of H ``(..., n, dim)``: ``(...)``, 1/n to 1."""
    squares = h.square().sum(-1)
    return squares.amax(-1) / squares.sum(-1).clamp(min=1e-300)


def distance_from_identity(matrix: Tensor) -> Tensor:
    """``|R - I| / sqrt(n)`` of R ``(..., n, n)``: ``(...)``."""
    return distance(matrix, torch.eye(matrix.size(-1), dtype=matrix.dtype, device=matrix.device))


def distance(a: Tensor, b: Tensor) -> Tensor:
    """``|A - B| / sqrt(n)`` of A and B ``(..., n, n)``: ``(...)``."""
    return torch.linalg.matrix_norm(a - b) / a.size(-1) ** 0.5


def as_at_the_start(skip: SkipConnection, seed: int | None = None) -> SkipConnection:
    """A fresh copy of ``skip``, at its place; ``seed``: that of the training, for rules that draw.

    The global random stream stays as it is.
    """
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        return type(skip)(skip.dim, place=skip.place, eps=skip.eps, **vars(skip.options))


def moved(skip: SkipConnection, start: SkipConnection) -> list[Row]:
    """The initial and the present size of each learned parameter, and of the change: all RMS."""
    fresh = start.learned()
    rows = []
    for name, parameter in skip.learned().items():
        before = fresh[name].detach().double().cpu()
        now = parameter.detach().double().cpu()
        change = now - before
        sizes = [float(tensor.square().mean().sqrt()) for tensor in (before, now, change)]
        rows.append({"parameter": name, **dict(zip(("start", "now", "change"), sizes))})
    return rows


def report(study: Study, stem: Path) -> None:
    """Measure the models of ``study``, print tables and sentences, write CSVs and the figure.

    Raises ``UserError`` for a model that has one stream.
    """
    rows: list[Row] = []
    movements: list[Row] = []
    for label, model, places in study.with_places():
        seed = study.seeds.get(label)
        starts = {}
        for name, skip in skips(model).items():
            if type(skip).streams is not SkipConnection.streams:  # a rule with streams
                starts[name] = as_at_the_start(skip, seed)
        with StreamProbe(model, starts) as probe, torch.no_grad():
            for batch in study.show_batches(label):
                study.losses(model, batch)
        for place in places:
            columns = probe.columns(place["block"])
            if columns is None:
                raise UserError(
                    f"{label}: {place['block']} has one stream: "
                    "expected hyper, mhc or another rule with several"
                )
            rows.append({**place, **columns})
            skip, start = probe.skips[place["block"]], starts[place["block"]]
            movements += [{**place, **each} for each in moved(skip, start)]
        figures.write_csv(Path(f"{stem}.csv"), rows)

    study.show(rows, QUANTITIES, stem)
    figures.write_csv(Path(f"{stem}-moved.csv"), movements)
    print(f"written to {stem}-moved.csv\n")
    for label, model in study.models.items():
        print("\n".join(sentences(label, model, rows, movements)))


def sentences(label: str, model: nn.Module, rows: list[Row], movements: list[Row]) -> list[str]:
    """A sentence each: whether a model's streams differ, whether they mix, and what was learned."""
    mine = figures.select(rows, model=label)
    later = [row for row in mine if row["index"] > 1] or mine  # a stack's first block has n copies
    number = fmean(row[NUMBER.column] for row in later)
    share = fmean(row[SHARE.column] for row in later)
    least = min(later, key=lambda row: row[NUMBER.column])
    farthest = max(mine, key=lambda row: row[DISTANCE.column])
    changed = max(mine, key=lambda row: row[MOVED.column])
    return [
        f"{label}: {number:.2f} effective streams on average after the first block, the fewest, "
        f"{least[NUMBER.column]:.2f}, in {least['block']}: {verdict(number, share)}.",
        f"{label}: the mixing matrix is at most {farthest[DISTANCE.column]:.2g} from the identity, "
        f"in {farthest['block']} (0 mixes nothing), and at most {changed[MOVED.column]:.2g} from "
        f"its start, in {changed['block']}.",
        f"{label}: since the start {what_moved(figures.select(movements, model=label))}.",
    ]


def verdict(number: float, share: float) -> str:
    """What an effective number of streams, and the dominant one's share, say."""
    if number >= COLLAPSED:
        return "they differ"
    if share >= DOMINANT:
        return f"they have collapsed, one has {share:.0%} of the squares"
    return "they are copies of one another, which no matrix can mix"


def what_moved(learned: list[Row]) -> str:
    """How many kinds of parameters have moved, which have not, and which moved least."""
    names = list(dict.fromkeys(row["parameter"] for row in learned))
    moving = [name for name in names if has_moved(figures.select(learned, parameter=name))]
    still = [name for name in names if name not in moving]
    exception = f", all but {', '.join(still)}" if still and moving else ""
    changes = {}
    for name in moving:
        changes[name] = max(row["change"] for row in figures.select(learned, parameter=name))
    least = min(changes, key=changes.__getitem__, default="")
    slowest = f"; {least} the least, by at most {changes[least]:.2g}" if least else ""
    return f"{len(moving)} of {len(names)} kinds of parameters have moved{exception}{slowest}"


def has_moved(rows: list[Row]) -> bool:
    """Whether a parameter has moved in any block."""
    return any(row["change"] > STILL * max(1.0, row["start"]) for row in rows)


class StreamWarning:
    """One warning in the log of a training whose streams do not differ after ``LONG`` updates."""

    def __init__(self) -> None:
        self.has_warned = False

    def line(self, step: int, probe: StreamProbe) -> str:
        """The warning, from what ``probe`` saw at update ``step``; "" where none is due."""
        if self.has_warned or step < LONG:
            return ""
        later = []
        for name, skip in probe.skips.items():
            row = probe.columns(name)
            if row is not None and not skip.place.is_first:
                later.append(row)
        if not later:
            return ""
        number = fmean(row[NUMBER.column] for row in later)
        if number >= COLLAPSED:
            return ""
        self.has_warned = True
        share = fmean(row[SHARE.column] for row in later)
        return (
            f"at update {step} the streams of the skip connections count as {number:.2f}: "
            f"{verdict(number, share)} (rskip analyze streams; docs/troubleshooting.md)"
        )
