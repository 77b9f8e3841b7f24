"""A prepared corpus: what data preparation leaves behind, checked before anything is computed from it."""

from dataclasses import dataclass
from pathlib import Path

from fairseq_rskip.errors import UserError
from fairseq_rskip.tools.lines import read_lines
from fairseq_rskip.tools.train.data import PREPARATION, ROOT, read_lengths, read_preparation

CORPORA = ROOT / "data"  # where data-prep and train.sh keep corpora by name
SUBSETS = ("train", "valid", "test")
# subwords in preparation.json -> fairseq's --post-process
POST_PROCESS = {"subword-nmt": "subword_nmt", "sentencepiece": "sentencepiece", "none": None}
TOKENIZERS = ("moses", "none")
PAPER_TOKENISED = "iwslt15-en-vi"
SPECIAL_SYMBOLS = 4  # <s>, <pad>, </s>, <unk> stand in no dictionary file


@dataclass
class Prepared:
    """A data-bin folder and what its preparation.json says of it."""

    folder: Path
    corpus: str
    src: str
    tgt: str
    bpe: str
    tokenizer: str
    normalise_punctuation: bool = False  # before the tokenizer

    @property
    def tokenised(self) -> bool:
        """Whether the raw text is tokens already, as IWSLT'15 EN-VI is published; sentencepiece is for plain text."""
        return self.tokenizer == "none" and (self.bpe != "sentencepiece" or self.corpus == PAPER_TOKENISED)

    def dictionary(self, language: str) -> Path:
        return self.folder / f"dict.{language}.txt"

    def subwords(self, language: str) -> Path | None:
        """The merge operations or the sentencepiece model of a language, which data preparation leaves beside the
        data-bin; None for a corpus without subwords. Raises ``UserError`` if the file is not there."""
        if self.bpe == "none":
            return None
        places = [self.folder.resolve().parent / "subwords" / name for name in (f"model.{language}", "model")]
        found = next((path for path in places if path.is_file()), None)
        if found is None:
            raise UserError(f"{self.folder} has no subwords beside it: {places[1]} is missing; prepare it again")
        return found

    def prefix(self, subset: str, language: str) -> Path:
        """What the names of a subset's binarised files begin with."""
        return self.folder / f"{subset}.{self.src}-{self.tgt}.{language}"

    def binarised(self, subset: str) -> list[Path]:
        """The files from which fairseq reads the subset's source sentences."""
        return [Path(f"{self.prefix(subset, self.src)}.{suffix}") for suffix in ("bin", "idx")]

    def reference(self, subset: str) -> Path:
        return self.folder / "raw" / f"{subset}.{self.tgt}"


def find(data: Path) -> Prepared:
    """The prepared corpus in ``data`` or in ``data``/data-bin; ``data`` may be the name of one in the project's data/.

    Raises ``UserError`` if there is none.
    """
    if not data.exists() and (CORPORA / data).is_dir():
        data = CORPORA / data
    if not data.is_dir():
        raise UserError(f"DATA {data} is not a folder; give one that data-prep/prepare-….sh made")
    for folder in (data, data / "data-bin"):
        if (folder / PREPARATION).is_file():
            break
    else:
        raise UserError(
            f"{data} is not prepared: neither it nor {data.name}/data-bin holds {PREPARATION};"
            " make it with data-prep/prepare-….sh"
        )
    prepared = _read_settings(folder)
    for language in (prepared.src, prepared.tgt):
        if not prepared.dictionary(language).is_file():
            raise UserError(f"{folder} is not prepared completely: dict.{language}.txt is missing; prepare it again")
    return prepared


def _read_settings(folder: Path) -> Prepared:
    path, settings = folder / PREPARATION, read_preparation(folder)
    names = ("corpus", "src", "tgt", "bpe", "tokenizer")
    if not all(isinstance(settings.get(name), str) for name in names):
        raise UserError(f"{path} must give, as text, {', '.join(names)}; prepare the corpus again")
    for name, accepted in (("bpe", list(POST_PROCESS)), ("tokenizer", list(TOKENIZERS))):
        if settings[name] not in accepted:
            raise UserError(f"{path} says {name} {settings[name]!r}; known are {', '.join(accepted)}")
    normalise = bool(settings.get("normalise_punctuation"))
    return Prepared(folder, **{name: settings[name] for name in names}, normalise_punctuation=normalise)


def read_references(prepared: Prepared, subset: str) -> list[str]:
    """The raw references of a subset that can be translated. Raises ``UserError`` naming what is missing."""
    if not all(path.is_file() for path in prepared.binarised(subset)):
        there = [name for name in SUBSETS if all(path.is_file() for path in prepared.binarised(name))]
        raise UserError(
            f"{prepared.folder} has no subset {subset!r} of {prepared.src}-{prepared.tgt};"
            f" it has {', '.join(there) or 'none at all'}"
        )
    path = prepared.reference(subset)
    if not path.is_file():
        raise UserError(f"{prepared.folder} has no raw references: {path} is missing; prepare the corpus again")
    return read_lines(path)


def check_sentences(prepared: Prepared, subset: str, references: list[str]) -> None:
    """Raises ``UserError`` if the binarised subset has another number of sentences than the references."""
    prefix = prepared.prefix(subset, prepared.src)
    count = len(read_lengths(prefix))
    if count != len(references):
        raise UserError(
            f"{prefix.name}.bin holds {count} sentences and {prepared.reference(subset)} {len(references)}:"
            " they are not of one preparation; prepare the corpus again"
        )


def check_lengths(prepared: Prepared, subset: str, limits: tuple[int, int], max_tokens: int) -> None:
    """Raises ``UserError`` if a sentence is longer than the model's ``limits`` (source, target) or than a batch.

    Not one may be left out: the score would be of another test set.
    """
    for language, side, limit in zip((prepared.src, prepared.tgt), ("source", "target"), limits):
        prefix = prepared.prefix(subset, language)
        if not Path(f"{prefix}.idx").is_file():  # fairseq-generate needs no target
            continue
        lengths = read_lengths(prefix)
        longest = int(lengths.argmax())
        what = f"sentence {longest + 1} of {subset} has {lengths[longest]} tokens in its {side} ({language})"
        if lengths[longest] > limit:
            raise UserError(
                f"{what}, and the model was trained to take {limit}: shorten the sentence and prepare the corpus again,"
                f" or train with --max-{side}-positions {lengths[longest]}"
            )
        if lengths[longest] > max_tokens:
            raise UserError(f"{what}, more than a batch may hold: give --max-tokens {lengths[longest]} or more")


def symbols(dictionary: Path) -> list[str]:
    """What a fairseq dictionary file lists, in order; the special symbols are not in it."""
    return [line.rsplit(" ", 1)[0] for line in read_lines(dictionary)]


def difference(ours: list[str], theirs: list[str]) -> str | None:
    """How two lists of symbols differ, in words; None if they do not."""
    if ours == theirs:
        return None
    if len(ours) != len(theirs):
        return f"{len(ours)} symbols in DATA, {len(theirs)} with the checkpoint"
    first = next(i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1])
    return f"symbol {first + 1} is {ours[first]!r} in DATA, {theirs[first]!r} with the checkpoint"
