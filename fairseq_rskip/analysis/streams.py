"""How the streams of hyper-connections and their relatives differ, mix and learn.

For H, the n streams that enter a block at one position: the effective number of streams is
``exp(-sum_k p_k log p_k)``, p the eigenvalues of the n x n matrix of their inner products, over
their sum: 1 if all streams are parallel, n if they are orthogonal and of one length. The dominant
stream's share is the largest ``|h_i|^2`` over the sum of all. The distance of the mixing matrix R
from the identity is ``|R - I| / sqrt(n)``, in Frobenius' norm, and from its start the same with the
matrix of a fresh copy of the rule in place of I. All are means over the positions of examples,
padding left out. What a parameter moved is measured against that copy, too.

A verdict needs thresholds, and these are conventions, not results of trained models. One stream has
collapsed the others where it has ``DOMINANT`` of the squares: all others together are a third of
its length. Below ``COLLAPSED`` effective streams they are copies: four streams of one length count
as 1.05 where their pairwise cosines are 0.99. Below ``1 + LITTLE (n - 1)`` they differ little: four
count as 1.3 at pairwise cosines of 0.93.
"""

import math
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..residual import KINDS, SkipConnection, skips
from ..residual.streams import HistorySkip, StreamSkip
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
COUNT = "streams"  # the column of n
LONG = 100  # updates after which a training is warned of streams that do not differ
HARDLY = 0.01  # a distance of the mixing matrix from its start that is next to nothing
STILL = 1e-6  # a change of a parameter below this share of its size, or of 1, is none
DOMINANT = 0.9  # the share of a stream beside which the others do not count
COLLAPSED = 1.05  # effective streams
LITTLE = 0.1  # the share of the way from 1 to n effective streams


class StreamProbe(Watch):
    """Measures, in a ``with`` block, the input streams of every skip connection with several.

    ``starts``: module name -> the skip connection as it was before the training. The distance of
    the mixing matrix from its start is measured where it is given.
    """

    def __init__(self, model: nn.Module, starts: dict[str, SkipConnection] | None = None):
        super().__init__(model)
        self.starts = starts or {}
        self.counts: dict[str, int] = {}  # module name -> n

    @torch.no_grad()
    def see(self, name: str, skip: SkipConnection, call: Call) -> None:
        streams = skip.streams(call.x)
        if streams is None:
            return
        h, matrix = (tensor.double() for tensor in streams)
        self.counts[name] = h.size(-2)
        values = {
            NUMBER.column: effective_number(h),
            SHARE.column: dominant_share(h),
        }
        if skip.mixes_streams:
            values[DISTANCE.column] = distance_from_identity(matrix).expand(h.shape[:-2])
        if skip.mixes_streams and name in self.starts:
            start = self.starts[name].to(call.x.device).streams(call.x)
            assert start is not None
            values[MOVED.column] = distance(matrix, start[1].double()).expand(h.shape[:-2])
        means = {
            column: example_mean(skip, value.unsqueeze(-1), call.mask).cpu()
            for column, value in values.items()
        }
        self.passes[name].append(means)

    def columns(self, name: str) -> Row | None:
        """The number of streams at the skip connection ``name``, the means over examples and their
        errors.

        None if its rule is not measured.
        """
        measured = self.values(name)
        if not measured:
            return None
        row: Row = {COUNT: self.counts[name]}
        for quantity in QUANTITIES:
            row[quantity.column] = row[quantity.error] = math.nan  # no matrix, or no start
            if quantity.column in measured:
                row[quantity.column], row[quantity.error] = estimate(measured[quantity.column])
        return row


def effective_number(h: Tensor) -> Tensor:
    """The effective number of streams of H ``(..., n, dim)``: ``(...)``, from 1 to n.

    NaN where H is not finite, as where fp16 overflows: eigvalsh would raise.
    """
    products = h @ h.transpose(-1, -2)
    is_finite = products.isfinite().all(-1).all(-1)
    products = products.where(is_finite[..., None, None], 0.0)
    eigenvalues = torch.linalg.eigvalsh(products).clamp(min=0.0)
    shares = eigenvalues / eigenvalues.sum(-1, keepdim=True).clamp(min=1e-300)
    return torch.special.entr(shares).sum(-1).exp().where(is_finite, torch.nan)


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

    Raises ``UserError`` for a model whose rule is not measured.
    """
    rows: list[Row] = []
    movements: list[Row] = []
    models = study.with_places()
    for label, model, places in models:  # before anything is measured
        for place in places:
            check_measured(label, place["block"], skips(model)[place["block"]])
    for label, model, places in models:
        modules = skips(model)
        seed = study.seeds.get(label)
        starts = {}
        for name, skip in modules.items():
            if is_measured(type(skip)):
                starts[name] = as_at_the_start(skip, seed)
        with StreamProbe(model, starts) as probe, torch.no_grad():
            for batch in study.show_batches(label):
                study.losses(model, batch)
        for place in places:
            columns = probe.columns(place["block"])
            assert columns is not None
            rows.append({**place, **columns})
            skip, start = modules[place["block"]], starts[place["block"]]
            movements += [{**place, **each} for each in moved(skip, start)]
        figures.write_csv(Path(f"{stem}.csv"), rows)

    quantities = QUANTITIES if any(map(mixes, study.models.values())) else (NUMBER, SHARE)
    study.show(rows, quantities, stem)
    if movements:
        figures.write_csv(Path(f"{stem}-moved.csv"), movements)
        print(f"written to {stem}-moved.csv")
    print()
    for label, model in study.models.items():
        print("\n".join(sentences(label, model, rows, movements)))


def is_measured(rule: type[SkipConnection]) -> bool:
    """Whether the rule has ``streams()``."""
    return rule.streams is not SkipConnection.streams


def check_measured(label: str, block: str, skip: SkipConnection) -> None:
    """Raise ``UserError`` unless the rule of ``skip`` is measured."""
    if is_measured(type(skip)):
        return
    reason = f"{block} has one stream"
    if isinstance(skip, StreamSkip):
        reason = f"the tensors that {block} keeps are not measured for {skip.kind}"
    if isinstance(skip, HistorySkip):
        reason = f"{block} ({skip.kind}) keeps outputs, which rskip analyze reads measures"
    kinds = ", ".join(sorted(kind for kind, rule in KINDS.items() if is_measured(rule)))
    raise UserError(f"{label}: {reason}: expected a rule of {kinds}")


def mixes(model: nn.Module) -> bool:
    """Whether a rule of ``model`` mixes its streams."""
    return any(skip.mixes_streams for skip in skips(model).values())


def sentences(label: str, model: nn.Module, rows: list[Row], movements: list[Row]) -> list[str]:
    """A sentence each: whether a model's streams differ, whether they mix, and what was learned."""
    mine = figures.select(rows, model=label)
    learned = figures.select(movements, model=label)
    stacks = [do_they_differ(figures.select(mine, group=group)) for group in groups_in(mine)]
    return [
        f"{label}: {'; '.join(stacks)}.",
        f"{label}: {how_they_mix(model, mine)}.",
        f"{label}: {what_moved(learned)}.",
    ]


def groups_in(rows: list[Row]) -> list[str]:
    """The stacks of ``rows``, such as encoder and decoder."""
    return list(dict.fromkeys(row["group"] for row in rows))


def do_they_differ(rows: list[Row]) -> str:
    """How many streams a stack has in effect, and the verdict."""
    later = [row for row in rows if row["index"] > 1] or rows  # a stack's first block has n copies
    mean = Mean(later)
    least = min(mean.rows, key=lambda row: row[NUMBER.column])
    side = f"{rows[0]['group']} " if rows[0]["group"] else ""
    without_first = " behind the first" if len(later) < len(rows) else ""
    return (
        f"{side}{mean.number:.2f} of {mean.count} effective streams (mean of {len(mean.rows)} "
        f"blocks{without_first}; the fewest, {least[NUMBER.column]:.2f}, in {least['block']}): "
        f"{mean.verdict()}"
    )


class Mean:
    """The means of those ``rows`` whose blocks have all n streams.

    The first blocks of multi-gate residuals have fewer.
    """

    def __init__(self, rows: list[Row]):
        self.count = max(row[COUNT] for row in rows)
        self.rows = figures.select(rows, **{COUNT: self.count})
        self.number = fmean(row[NUMBER.column] for row in self.rows)
        self.share = fmean(row[SHARE.column] for row in self.rows)

    def differ(self) -> bool:
        """Whether the streams are neither copies nor one beside which the others do not count."""
        return self.count == 1 or not (self.share >= DOMINANT or self.number < COLLAPSED)

    def verdict(self) -> str:
        """What the effective number of streams, and the dominant one's share, say."""
        if self.count == 1:
            return "there is only one"
        if self.share >= DOMINANT:
            return f"they have collapsed, one has {self.share:.0%} of the squares"
        if self.number < COLLAPSED:
            return "they are copies of one another"
        if self.number < 1 + LITTLE * (self.count - 1):
            return "they differ little"
        return "they differ"


def how_they_mix(model: nn.Module, rows: list[Row]) -> str:
    """How far the mixing matrix is from the identity and from its start."""
    if not mixes(model):
        kinds = {skip.kind for skip in skips(model).values()}
        return f"{' and '.join(sorted(kinds))} does not mix its streams"
    farthest = max(rows, key=lambda row: row[DISTANCE.column])
    changed = max(rows, key=lambda row: row[MOVED.column])
    hardly = ", next to nothing" if changed[MOVED.column] < HARDLY else ""
    return (
        f"the mixing matrix is farthest from the identity, {farthest[DISTANCE.column]:.2g}, in "
        f"{farthest['block']} (0 keeps every stream as it is), and farthest from its start, "
        f"{changed[MOVED.column]:.2g}, in {changed['block']}{hardly}"
    )


def what_moved(learned: list[Row]) -> str:
    """How many kinds of parameters have moved, which have not, and which moved least."""
    if not learned:
        return "the rule learns nothing but its norms"
    names = list(dict.fromkeys(row["parameter"] for row in learned))
    moving = [name for name in names if has_moved(figures.select(learned, parameter=name))]
    still = [name for name in names if name not in moving]
    exception = f", all but {', '.join(still)}" if still and moving else ""
    changes = {}
    for name in moving:
        changes[name] = max(row["change"] for row in figures.select(learned, parameter=name))
    least = min(changes, key=changes.__getitem__, default="")
    slowest = f"; {least} the least, by {changes[least]:.2g} where most" if least else ""
    kinds = f"{len(moving)} of {len(names)} kinds of parameters"
    return f"since the start {kinds} have moved{exception}{slowest}"


def has_moved(rows: list[Row]) -> bool:
    """Whether a parameter has moved in any block."""
    return any(row["change"] > STILL * max(1.0, row["start"]) for row in rows)


class StreamWarning:
    """Warnings in the log of a training whose streams do not differ for ``LONG`` updates in a row.

    One for a stack whose streams have not become different since the start, where hyper-connections
    have copies, and one if they had and are no longer. A warm-up does not count: its steps are
    small.
    """

    def __init__(self) -> None:
        self.since: dict[str, int] = {}  # stack -> the first of the updates in a row
        self.differed: set[str] = set()  # stacks whose streams ever did
        self.said: set[tuple[str, bool]] = set()

    def line(self, step: int, probe: StreamProbe, warms_up: bool = False) -> str:
        """The warning, from what ``probe`` saw at update ``step``; "" where none is due."""
        lines = []
        for side, rows in later_blocks(probe).items():
            mean = Mean(rows)
            if mean.differ():
                self.differed.add(side)
            if mean.differ() or warms_up:
                self.since.pop(side, None)
                continue
            had_differed = side in self.differed
            is_long = step - self.since.setdefault(side, step) >= LONG
            if is_long and (side, had_differed) not in self.said:
                self.said.add((side, had_differed))
                lines.append(
                    f"the streams of the {side} count as {mean.number:.2f} of {mean.count}: "
                    f"{mean.verdict()}, "
                    + ("and had differed" if had_differed else "as since the start")
                )
        return f"at update {step} {'; '.join(lines)} (rskip analyze streams)" if lines else ""


def later_blocks(probe: StreamProbe) -> dict[str, list[Row]]:
    """Stack -> what was measured in its blocks but the first, which has copies of its input."""
    by_side: dict[str, list[Row]] = {}
    for name, skip in probe.skips.items():
        row = probe.columns(name)
        if row is not None and not skip.place.is_first:
            by_side.setdefault(skip.place.side, []).append(row)
    return by_side
