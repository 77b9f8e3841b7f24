"""Whether two rows differ, and what could have been found: Welch's t-test over seeds, Holm's correction, power; and
sacreBLEU's paired tests of two translations of a test set, with what has been computed kept in a file.

Approximate randomisation is two-sided. The bootstrap centres the absolute differences of its resamples, which makes
its p about one-sided: about 0.4 for two systems of the same score, where a two-sided test has 1.
"""

import hashlib
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import sacrebleu
from sacrebleu.significance import PairedTest
from scipy import optimize, stats

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json
from fairseq_rskip.tools.lines import read_lines
from fairseq_rskip.tools.reproduce.translation import EVALUATION
from fairseq_rskip.tools.score import make_metric, moses_tokens, split_compounds

LEVEL, POWER = 0.05, 0.8
OVER_SEEDS = ""  # the key of a test that has all seeds in it
KINDS = {  # sacreBLEU's name, how often by default, what a report says
    "bootstrap": ("bs", 1000, "sacreBLEU's paired bootstrap, whose p is about one-sided, {:,} resamples"),
    "randomisation": ("ar", 10000, "approximate randomisation, two-sided, {:,} trials"),
}
LEAST_DIFFERENT = 10  # translations: sacreBLEU counts a trial that equals what was found as less, which few make likely
SEED = "12345"  # sacreBLEU's own; a fixed one makes reports repeatable


@dataclass(frozen=True)
class Comparison:
    """p-values of a row against another: by seed ("1", "2", ...), or one over all seeds; or the ``reason`` for none.

    ``untested`` are the seeds without a p beside others that have one, each with the reason.
    """

    p: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    untested: Mapping[str, str] = field(default_factory=dict)

    @property
    def beyond_noise(self) -> bool:
        """Whether every test says so."""
        return bool(self.p) and all(value < LEVEL for value in self.p.values())


def welch(ours: Sequence[float], others: Sequence[float]) -> Comparison:
    """Welch's t-test, two-sided, of two samples of seeds."""
    if min(len(ours), len(others)) < 2:
        return Comparison(reason="needs 2 seeds")
    if len(set(ours)) == len(set(others)) == 1:
        return Comparison(reason="no variance")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of nearly equal values: what comes out is looked at
        p = float(stats.ttest_ind(ours, others, equal_var=False).pvalue)
    return Comparison({OVER_SEEDS: p}) if math.isfinite(p) else Comparison(reason="no variance")


def holm(p: Mapping[int, float]) -> dict[int, float]:
    """Holm's step-down adjustment of the p-values of one family (Holm 1979)."""
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(p, key=p.get)):
        largest = adjusted[name] = max(largest, min(1.0, (len(p) - rank) * p[name]))
    return adjusted


def correct(comparisons: Sequence[Comparison]) -> list[dict[str, float]]:
    """Holm-adjusted p-values of each; what is compared here is one family, and each seed's tests one of their own."""
    adjusted: list[dict[str, float]] = [{} for _ in comparisons]
    for seed in sorted({seed for comparison in comparisons for seed in comparison.p}):
        family = {n: comparison.p[seed] for n, comparison in enumerate(comparisons) if seed in comparison.p}
        for n, p in holm(family).items():
            adjusted[n][seed] = p
    return adjusted


def pooled_deviation(samples: Sequence[Sequence[float]]) -> float | None:
    """The standard deviation within samples, all taken together; None without two values in any."""
    squares = sum(stats.tvar(sample) * (len(sample) - 1) for sample in samples if len(sample) > 1)
    freedom = sum(len(sample) - 1 for sample in samples if len(sample) > 1)
    return math.sqrt(squares / freedom) if freedom else None


def detectable(deviation: float, seeds: int) -> float:
    """The smallest difference of two means of so many seeds that Welch's test finds with ``POWER`` at ``LEVEL``.

    Two-sided, not corrected, where both rows have the standard deviation ``deviation``: Welch's degrees of freedom
    are then 2 (seeds - 1), and t is noncentral with d / (deviation sqrt(2 / seeds)). The chance to find it with the
    wrong sign is below 1e-5 there, and left out.
    """
    freedom = 2 * (seeds - 1)
    limit = stats.t.ppf(1 - LEVEL / 2, freedom)
    centre = optimize.brentq(lambda centre: POWER - stats.nct.sf(limit, freedom, centre), 0.0, 2 * limit + 3)
    return float(centre) * deviation * math.sqrt(2 / seeds)


class Untested(Exception):
    """Why two runs cannot be tested, in a few words."""


@dataclass(frozen=True)
class System:
    """A run's translations and references, and the ``score`` that metrics.json has for them by the metric ``name``."""

    hypotheses: list[str]
    references: list[list[str]]
    language: str
    name: str
    score: float

    def prepared(self) -> tuple[list[str], list[list[str]]]:
        """Both texts as the metric takes them. Raises ``Untested`` if they do not give the score any more.

        What evaluate.sh does to the text before a score depends on the corpus; the score tells which it was.
        """
        for tokenise in (False, True) if self.name in ("tokenised BLEU", "compound-split BLEU") else (False,):
            texts = [self.hypotheses, *self.references]
            texts = [moses_tokens(lines, self.language) for lines in texts] if tokenise else texts
            if self.name == "compound-split BLEU":
                texts = [[split_compounds(line) for line in lines] for lines in texts]
            hypotheses, *references = texts
            if abs(make_metric(self.name).corpus_score(hypotheses, references).score - self.score) < 1e-6:
                return hypotheses, references
        raise Untested("its files give another score now")


class PairedTests:
    """Tests, of ``kind`` if the user wants one; the file ``cache`` keeps p-values by a hash of all they depend on."""

    def __init__(self, cache: Path, kind: str = "", samples: int = 0):
        self.cache, self.kind, self._samples = cache, kind, samples
        try:
            self._known: dict[str, Any] = dict(json.loads(cache.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            self._known = {}

    def samples(self, kind: str) -> int:
        return self._samples or KINDS[kind][1]

    def name(self, kind: str) -> str:
        """What a report says of the test."""
        name = KINDS[kind][2].format(self.samples(kind))
        return f"{name}, random seed {SEED} (sacreBLEU {sacrebleu.__version__})"

    def p_value(self, system: System, baseline: System, kind: str = "randomisation") -> float:
        """The test's p. Raises ``Untested`` where the two are not translations of one test set, or hardly differ."""
        if len(system.hypotheses) != len(baseline.hypotheses) or system.references != baseline.references:
            raise Untested("other test set")
        if system.hypotheses == baseline.hypotheses:
            raise Untested("same translations")  # sacreBLEU would give the smallest p there is
        different = sum(ours != theirs for ours, theirs in zip(system.hypotheses, baseline.hypotheses))
        if different < LEAST_DIFFERENT:
            raise Untested(f"only {different} translations differ")
        facts = [sacrebleu.__version__, kind, self.samples(kind), SEED, astuple(system), astuple(baseline)]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        if not isinstance(self._known.get(key), float):
            self._known[key] = self._compute(system, baseline, kind)
            write_json(self.cache, dict(sorted(self._known.items())))
        return self._known[key]

    def _compute(self, system: System, baseline: System, kind: str) -> float:
        hypotheses, references = system.prepared()
        systems = [("baseline", baseline.prepared()[0]), ("system", hypotheses)]
        os.environ["SACREBLEU_SEED"] = SEED  # sacreBLEU takes the seed of its tests from there alone
        metrics = {"metric": make_metric(system.name)}
        _, scores = PairedTest(systems, metrics, references, KINDS[kind][0], self.samples(kind))()
        return float(next(results for name, results in scores.items() if name != "System")[1].p_value)


def load_system(folder: Path, metrics: dict[str, Any], name: str) -> System:
    """What the run in ``folder`` translated, with its score ``name``. Raises ``Untested`` where the files are gone."""
    paths = [Path(reference) for reference in metrics.get("references", ())]
    if not paths:
        raise Untested("no references in its record")
    hypotheses = _lines(folder / EVALUATION / "hyp.txt", "translations")
    references = [_lines(path, "references") for path in paths]
    if {len(lines) for lines in references} != {len(hypotheses)}:
        raise Untested("translations and references differ in length")
    return System(hypotheses, references, paths[0].suffix[1:], name, metrics["values"][name])


def _lines(path: Path, what: str) -> list[str]:
    try:
        return read_lines(path)
    except UserError:
        raise Untested(f"{what} not readable") from None
