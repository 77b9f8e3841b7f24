"""sacreBLEU's paired tests of two translations of a test set, with what has been computed kept in a file.

Approximate randomisation is two-sided. The bootstrap centres the absolute differences of its resamples, which makes
its p about one-sided: about 0.4 for two systems of the same score, where a two-sided test has 1.
"""

import contextlib
import functools
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import sacrebleu
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest

from fairseq_rskip.errors import UserError
from fairseq_rskip.files import write_json
from fairseq_rskip.tools.reproduce.translation import EVALUATION
from fairseq_rskip.tools.score import moses_tokens, split_compounds
from fairseq_rskip.tools.text import read_lines

BOOTSTRAP, RANDOMISATION = "bootstrap", "randomisation"
KINDS = {BOOTSTRAP: ("bs", 1000), RANDOMISATION: ("ar", 10000)}
NAMES = {
    BOOTSTRAP: "sacreBLEU's paired bootstrap, whose p is about one-sided, {:,} resamples",
    RANDOMISATION: "approximate randomisation, two-sided, {:,} trials",
}
LEAST_DIFFERENT = 10  # translations: sacreBLEU counts a trial that equals what was found as less, which few make likely
SEED = "12345"  # sacreBLEU's own; a fixed one makes reports repeatable


class Untested(Exception):
    """Why two runs cannot be tested, in a few words."""


@dataclass(frozen=True)
class System:
    """A run's translations and references, and what metrics.json says of the metric ``name`` for them."""

    hypotheses: List[str]
    references: List[List[str]]
    language: str
    name: str
    signature: str
    score: float

    def prepared(self) -> Tuple[List[str], List[List[str]]]:
        """Both texts as the metric takes them. Raises ``Untested`` if they do not give the score any more."""
        for prepare in PREPARATIONS.get(self.name, (_as_it_is,)):
            hypotheses, *references = (prepare(lines, self.language) for lines in (self.hypotheses, *self.references))
            score = make_metric(self.signature).corpus_score(hypotheses, references).score
            if abs(score - self.score) < 1e-6:
                return hypotheses, references
        raise Untested("its files give another score now")


class PairedTests:
    """Tests, of ``kind`` if the user wants one; the file ``cache`` keeps p-values by a hash of all they depend on."""

    def __init__(self, cache: Path, kind: str = "", samples: int = 0):
        self.cache, self.kind, self._samples = cache, kind, samples
        try:
            self._known: Dict[str, Any] = dict(json.loads(cache.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            self._known = {}

    def samples(self, kind: str) -> int:
        return self._samples or KINDS[kind][1]

    def name(self, kind: str) -> str:
        """What a report says of the test."""
        name = NAMES[kind].format(self.samples(kind))
        return f"{name}, random seed {SEED} (sacreBLEU {sacrebleu.__version__})"

    def p_value(self, system: System, baseline: System, kind: str = RANDOMISATION) -> float:
        """The test's p. Raises ``Untested`` where the two are not translations of one test set, or hardly differ."""
        if len(system.hypotheses) != len(baseline.hypotheses) or system.references != baseline.references:
            raise Untested("other test set")
        if _settings(system.signature) != _settings(baseline.signature):
            raise Untested("other metric")
        if system.hypotheses == baseline.hypotheses:
            raise Untested("same translations")  # sacreBLEU would give the smallest p there is
        different = sum(ours != theirs for ours, theirs in zip(system.hypotheses, baseline.hypotheses))
        if different < LEAST_DIFFERENT:
            raise Untested(f"only {different} translations differ")
        key = self._key(system, baseline, kind)
        if not isinstance(self._known.get(key), float):
            self._known[key] = self._compute(system, baseline, kind)
            write_json(self.cache, dict(sorted(self._known.items())))
        return self._known[key]

    def _key(self, system: System, baseline: System, kind: str) -> str:
        facts = [sacrebleu.__version__, kind, self.samples(kind), SEED, _settings(system.signature)]
        facts += [system.name, system.score, baseline.score]
        facts += [system.hypotheses, baseline.hypotheses, system.references]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _compute(self, system: System, baseline: System, kind: str) -> float:
        hypotheses, references = system.prepared()
        systems = [("baseline", baseline.prepared()[0]), ("system", hypotheses)]
        metrics = {"metric": make_metric(system.signature)}
        with _random_seed():
            _, scores = PairedTest(systems, metrics, references, KINDS[kind][0], self.samples(kind))()
        return float(next(results for name, results in scores.items() if name != "System")[1].p_value)


@contextlib.contextmanager
def _random_seed() -> Iterator[None]:
    """sacreBLEU takes the seed of its tests from the environment alone."""
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = SEED
    try:
        yield
    finally:
        del os.environ["SACREBLEU_SEED"]
        if before is not None:
            os.environ["SACREBLEU_SEED"] = before


def _settings(signature: str) -> Dict[str, str]:
    return dict(part.split(":", 1) for part in signature.split("|") if ":" in part and not part.startswith("version:"))


@functools.lru_cache(maxsize=None)  # a metric remembers the lines that it has tokenised
def make_metric(signature: str) -> Metric:
    """The metric that signs so: BLEU, or chrF, which has character n-grams (nc). Raises ``Untested``."""
    fields = _settings(signature)
    try:
        if "nc" in fields:
            return CHRF(
                char_order=int(fields["nc"]),
                word_order=int(fields["nw"]),
                whitespace=fields["space"] == "yes",
                lowercase=fields["case"] == "lc",
                eps_smoothing=fields["eff"] == "no",
            )
        lowercase, effective = fields["case"] == "lc", fields["eff"] == "yes"
        smooth = fields["smooth"].partition("[")[0]
        return BLEU(lowercase, True, fields["tok"], smooth_method=smooth, effective_order=effective)
    except (KeyError, ValueError):
        raise Untested(f"no test for {signature}") from None


def load_system(folder: Path, metrics: Dict[str, Any], name: str) -> System:
    """What the run in ``folder`` translated, with its score ``name``. Raises ``Untested`` where the files are gone."""
    try:
        signature, score = metrics["signatures"][name], metrics["values"][name]
        paths = [Path(reference) for reference in metrics["references"]]
        language = paths[0].suffix[1:]
    except (KeyError, TypeError, IndexError):
        raise Untested("no signature or references in metrics.json") from None
    hypotheses = _lines(folder / EVALUATION / "hyp.txt", "translations")
    references = [_lines(path, "references") for path in paths]
    if {len(lines) for lines in references} != {len(hypotheses)}:
        raise Untested("translations and references differ in length")
    return System(hypotheses, references, language, name, signature, score)


def _lines(path: Path, what: str) -> List[str]:
    try:
        return read_lines(path)
    except UserError:
        raise Untested(f"{what} not readable") from None


def _as_it_is(lines: List[str], language: str) -> List[str]:
    return lines


def _split(lines: List[str], language: str) -> List[str]:
    return [split_compounds(line) for line in lines]


def _moses_split(lines: List[str], language: str) -> List[str]:
    return _split(moses_tokens(lines, language), language)


# What evaluate.sh does to the text before these scores depends on the corpus; the score tells which it was.
PREPARATIONS: Dict[str, Tuple[Callable[[List[str], str], List[str]], ...]] = {
    "tokenised BLEU": (_as_it_is, moses_tokens),
    "compound-split BLEU": (_split, _moses_split),
}
