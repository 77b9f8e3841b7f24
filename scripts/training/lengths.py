"""How long the sentences of a binarised corpus are, and whether the held-out ones fit the model and its batches.

fairseq leaves out training sentences that are too long, and ends with a traceback at the first validation over others.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Tuple

from fairseq_rskip.errors import UserError

POSITIONS = 1024  # fairseq's --max-source-positions and --max-target-positions


def read_lengths(prefix: Path):
    """A numpy array of the tokens, end-of-sentence counted, in each sentence of ``prefix``.bin.

    Raises ``UserError`` if fairseq could not read it.
    """
    import numpy
    from fairseq.data import indexed_dataset  # takes seconds to import

    try:
        data = indexed_dataset.make_dataset(str(prefix), indexed_dataset.infer_dataset_impl(str(prefix)))
        lengths = numpy.array(data.sizes)  # the reader's own are gone with it
    except Exception as error:  # the reader checks with assert, struct and numpy
        raise UserError(f"cannot read {prefix}.idx ({type(error).__name__}); prepare the corpus again") from None
    return lengths


@dataclass
class HeldOut:
    """A held-out subset: how many sentences it has, how many of them the model takes, tokens in the longest of those.

    ``note`` says which are too long; empty if none is.
    """

    count: int = 0
    kept: int = 0
    longest: int = 0
    note: str = ""


def measure(folder: Path, subset: str, languages: Tuple[str, str], limits: Tuple[int, int], truncate: bool) -> HeldOut:
    """What of ``subset`` fits ``limits``, the most tokens of source and target; or fairseq is to ``truncate`` sources.

    A subset that is not there is empty: to find that is fairseq's. Raises ``UserError``.
    """
    import numpy

    prefixes = [folder / f"{subset}.{'-'.join(languages)}.{language}" for language in languages]
    if not all(Path(f"{prefix}.idx").is_file() for prefix in prefixes):
        return HeldOut()
    sides = [read_lengths(prefix) for prefix in prefixes]
    if len(sides[0]) != len(sides[1]):
        raise UserError(f"{prefixes[0]} and {prefixes[1]} hold {len(sides[0])} and {len(sides[1])} sentences")
    if truncate:
        sides[0] = sides[0].clip(max=limits[0])
    fits = numpy.ones(len(sides[0]), dtype=bool)
    note = ""
    for lengths, limit, side in zip(sides, limits, ("source", "target")):
        bad = numpy.flatnonzero(lengths > limit)
        if len(bad):
            first = f"sentence {bad[0] + 1}: {lengths[bad[0]]} tokens, --max-{side}-positions {limit}"
            note = note or f"{subset} {first}"
            fits[bad] = False
    longest = max((int(lengths[fits].max()) for lengths in sides if fits.any()), default=0)
    return HeldOut(len(fits), int(fits.sum()), longest, note)


def validation_options(
    folder: Path, languages: Tuple[str, str], limits: Tuple[int, int], given: Dict[str, Any], step: Dict[str, Any]
) -> Tuple[Dict[str, Any], List[str]]:
    """What lets fairseq-train validate on held-out sentences of any length, and lines that say what was left out.

    ``step`` holds the options of a batch that the user did not give. Raises ``UserError`` where nothing would be left.
    """
    result, notes = {}, []
    if given.get("disable_validation"):
        return result, notes
    longest = 0
    for subset in (given.get("valid_subset") or "valid").split(","):
        found = measure(folder, subset, languages, limits, bool(given.get("truncate_source")))
        longest = max(longest, found.longest)
        if not found.note:
            continue
        if not found.kept:
            raise UserError(f"every sentence of {subset} is longer than the model takes ({found.note})")
        result["skip-invalid-size-inputs-valid-test"] = True
        notes.append(f"validation leaves out {found.count - found.kept} of {found.count} as too long ({found.note})")
    chosen = given.get("max_tokens_valid")  # text, to fairseq: its default refers to --max-tokens
    if chosen is not None and not str(chosen).isdigit():
        raise UserError(f"--max-tokens-valid must be a whole number, got {chosen!r}")
    chosen = int(chosen or 0)
    room = chosen or step.get("max-tokens-valid") or given.get("max_tokens") or step.get("max-tokens")
    if room and longest > room:
        if chosen:
            raise UserError(f"--max-tokens-valid {chosen} is less than the longest held-out sentence, {longest} tokens")
        result["max-tokens-valid"] = longest
    return result, notes
