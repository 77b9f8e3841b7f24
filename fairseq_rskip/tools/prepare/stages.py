"""How a published corpus or your own text becomes a fairseq data-bin, stage by stage.

A stage fills the folder OUT/NAME.part, which becomes OUT/NAME when it is complete. Its key, in the
file .key, stands for its inputs: the stages before it and its options. A stage with the same key is
not made again. A part with the same key is resumed: every file in it is complete, because files are
written under other names first.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.files import PART
from fairseq_rskip.pretrained import text as encoders
from fairseq_rskip.tools import lines
from fairseq_rskip.tools.corpus import PREPARATION, SPLITS
from fairseq_rskip.tools.prepare import archives, subwords, text
from fairseq_rskip.tools.prepare.sources import Published, Source
from fairseq_rskip.tools.process import follow

FORMAT = "2"  # of the stages' files; another number makes all of them again
KEY = ".key"
MOST_UNKNOWN = 1.0  # percent of a held-out text; subwords of one kind of text leave below a tenth


@dataclass(frozen=True)
class Preparation:
    """What to prepare, and how.

    ``tgt`` is "" for a language model's text; a ``bpe_size`` of None follows the corpus.
    """

    corpus: str
    out: Path
    source: Source
    src: str
    tgt: str
    tokenizer: str
    bpe: str
    bpe_size: int | None
    joined: bool  # one set of subwords and one dictionary for both languages
    normalise_punctuation: bool
    max_length: int
    max_ratio: float
    workers: int
    replace: bool = False  # a data-bin that was made from other text or with other options

    @property
    def languages(self) -> list[str]:
        """The source, and the target if there is one."""
        return [self.src, self.tgt] if self.tgt else [self.src]

    @property
    def facts(self) -> dict[str, Any]:
        """What preparation.json says of the choices."""
        return {
            "corpus": self.corpus,
            "src": self.src,
            "tgt": self.tgt,
            "bpe": self.bpe,
            "bpe_size": self.bpe_size,
            "tokenizer": self.tokenizer,
            "normalise_punctuation": self.normalise_punctuation,
            "joined_dictionary": self.joined,
            "max_length": self.max_length,
            "max_ratio": self.max_ratio,
        }


def prepare(plan: Preparation) -> None:
    """Make OUT/data-bin; what is up to date is not made again. Raises ``UserError``."""
    source = plan.source
    if isinstance(source, Published):
        archives.fetch_all(source.archives, plan.out / "archives", plan.corpus)
    chain = Stages(plan.corpus, plan.out, source.identity(), plan.replace)
    if isinstance(source, Published) and source.members:
        members = source.members
        chain.make("unpacked", lambda part: unpack(plan.out, members, part), members)
    chain.make(
        "raw",
        lambda part: source.write_raw(plan.out, part, plan.languages),
        *plan.languages,
        *source.splitting(),
    )
    chain.make(
        "text",
        lambda part: tokenise(plan, part),
        plan.tokenizer,
        plan.normalise_punctuation,
    )
    if plan.bpe_size is None and plan.bpe != "none":
        plan = dataclasses.replace(plan, bpe_size=choose_bpe_size(plan))
    chain.make(
        "subwords",
        lambda part: split_words(plan, part),
        plan.bpe,
        plan.bpe_size,
        plan.joined,
        plan.max_length,
        plan.max_ratio,
    )
    chain.make("data-bin", lambda part: binarise(plan, part), plan.corpus)
    print_line(
        f"{plan.corpus}: ready: {plan.out / 'data-bin'}; its preparation.json has the numbers of "
        "sentences, tokens and unknown words"
    )
    print_warnings(plan)


def print_warnings(plan: Preparation) -> None:
    """Print what may be wrong with the text of a data-bin that was made."""
    data_bin = plan.out / "data-bin"
    warnings = unknown_words(json.loads((data_bin / PREPARATION).read_text("utf-8")))
    if plan.tgt:
        warnings += empty_sides(data_bin / "raw", plan.languages)
    for warning in warnings:
        print_line(f"warning: {plan.corpus}: {warning}", "stderr")


def unknown_words(facts: dict[str, Any]) -> list[str]:
    """A warning for each held-out side of preparation.json with many tokens that training lacks."""
    warnings = []
    for split in ("valid", "test"):
        for language, percent in facts["splits"][split]["unknown_percent"].items():
            if percent > MOST_UNKNOWN:
                warnings.append(
                    f"{percent:.1f} % of the tokens in {split}.{language} are unknown: no training "
                    "text has them, so the model sees <unk>; is it of the same kind and language?"
                )
    return warnings


def empty_sides(folder: Path, languages: list[str]) -> list[str]:
    """A warning for each held-out file of pairs in ``folder`` that has blank lines.

    They are kept, since a score covers the whole test set.
    """
    warnings = []
    for split in ("valid", "test"):
        for language in languages:
            path = folder / f"{split}.{language}"
            blank = []
            for number, line in enumerate(lines.read(path), start=1):
                if not line.strip():
                    blank.append(str(number))
            if not blank:
                continue
            which = ", ".join(blank[:5])
            if len(blank) > 5:
                which += ", ..."
            warnings.append(
                f"{path.name} has blank lines, {len(blank):,} in all ({which}), which count in "
                "losses and scores: is a sentence missing, or are the files shifted?"
            )
    return warnings


class Stages:
    """The chain of a corpus's stages in ``out``; its first key is the identity of the source.

    ``replace`` allows to make stages again of which a complete data-bin was made.
    """

    def __init__(self, corpus: str, out: Path, made_from: str, replace: bool = False):
        self.corpus, self.out, self.key, self.replace = corpus, out, made_from, replace

    def make(self, name: str, fill: Callable[[Path], None], *depends_on: Any) -> None:
        """Have ``fill`` fill the stage's folder, unless it has been made from the same inputs.

        Raises ``UserError`` where the folder is not a stage's, or is one of another data-bin.
        """
        words = [FORMAT, self.key, name, *map(str, depends_on)]
        self.key = hashlib.sha256("\0".join(words).encode()).hexdigest()
        folder, part = self.out / name, self.out / f"{name}.part"
        _check_is_a_stage(folder)
        _check_is_a_stage(part)
        made_from = _read_key(folder)
        if made_from == self.key:
            print_line(f"{self.corpus}: {name}: up to date")
            return
        if made_from:
            self._check_may_replace(name)
        self._begin(part)
        print_line(f"{self.corpus}: {name}")
        fill(part)
        # not a name that a user would choose
        _put_in_place(part, folder, replaced=self.out / f".{name}.replaced")

    def _check_may_replace(self, name: str) -> None:
        """Raise ``UserError`` where a data-bin was made from the stage ``name`` as it is."""
        data_bin = self.out / "data-bin"
        if _read_key(data_bin) and not self.replace:
            raise UserError(
                f"{data_bin} was made from other text, with other options or by another version "
                f"({name} differs), and what was trained on it needs it: expected another FOLDER, "
                "or --replace"
            )

    def _begin(self, part: Path) -> None:
        """Empty ``part``, unless an earlier call began it from the same inputs."""
        if _read_key(part) != self.key:
            _remove(part)
            part.mkdir()
            (part / KEY).write_text(self.key)
        for unfinished in part.rglob(f".*{PART}"):  # begun by a killed step
            unfinished.unlink()


def _read_key(folder: Path) -> str:
    """The key of a stage's folder; "" where it has none, or a full disk left it empty."""
    key = folder / KEY
    return key.read_text().strip() if key.is_file() else ""


def _check_is_a_stage(folder: Path) -> None:
    """Raise ``UserError`` for a folder with files of other origin."""
    if folder.exists() and not (folder / KEY).is_file() and any(folder.iterdir()):
        raise UserError(
            f"{folder} is there already and was not made by rskip prepare: move it, or choose "
            "another FOLDER"
        )


def _put_in_place(part: Path, folder: Path, replaced: Path) -> None:
    """Rename ``part`` to ``folder``, whose old content is called ``replaced`` meanwhile."""
    _remove(replaced)  # an earlier process was killed below
    if folder.exists():
        folder.rename(replaced)
    part.rename(folder)
    _remove(replaced)


def _remove(folder: Path) -> None:
    """Remove a stage's folder, if it is there; of a link to one only the link."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def unpack(out: Path, members: dict[str, str], part: Path) -> None:
    """Extract the needed members of each archive."""
    for name, pattern in members.items():
        done = part / f".{name}"
        if not done.exists():
            archives.unpack(out / "archives" / name, pattern, part)
            done.touch()


def encode(
    plan: Preparation, language: str, source: Path, target: Path, make: Callable, *arguments: Any
) -> None:
    """Write the files of ``language`` that ``target`` lacks, encoded by ``make(*arguments)``."""
    names = [f"{split}.{language}" for split in SPLITS]
    text.encode(source, target, names, plan.workers, make, arguments)


def tokenise(plan: Preparation, part: Path) -> None:
    """Write the words of the raw text, separated by spaces, or the text itself, cleaned."""
    raw = plan.out / "raw"
    for language in plan.languages:
        if plan.tokenizer == "none":
            encode(plan, language, raw, part, encoders.make_clean)
        else:
            normalises = plan.normalise_punctuation
            encode(plan, language, raw, part, encoders.make_moses, language, normalises)


def choose_bpe_size(plan: Preparation) -> int:
    """Choose the number of subwords for the training text, and print it."""
    text_lines = lines.read(plan.out / "text" / f"train.{plan.src}")
    count = sum(1 for line in text_lines if line)  # a blank one ends a document
    texts = [plan.out / "text" / f"train.{language}" for language in plan.languages]
    size = subwords.size_for(plan.bpe, count, subwords.count_characters(texts))
    unit = "merges" if plan.bpe == "subword-nmt" else "subwords"
    what = "pairs" if plan.tgt else "lines"
    print_line(
        f"{plan.corpus}: {size:,} {unit} for {count:,} training {what}; --bpe-size N changes it"
    )
    return size


def split_words(plan: Preparation, part: Path) -> None:
    """Write the subwords of the text into ``all``, and the training pairs of suitable lengths."""
    words = plan.out / "text"
    everything = part / "all"
    if plan.bpe == "none":
        _link("../text", everything)
    else:
        everything.mkdir(exist_ok=True)
        for language in plan.languages:
            model = part / ("model" if plan.joined else f"model.{language}")
            learn_from = plan.languages if plan.joined else [language]
            if not model.exists():
                texts = [words / f"train.{each}" for each in learn_from]
                options = {}
                if plan.bpe == "sentencepiece" and isinstance(plan.source, Published):
                    options["longest_line"] = subwords.LONGEST_PUBLISHED_LINE
                subwords.LEARNERS[plan.bpe](texts, model, plan.bpe_size, **options)
            encode(plan, language, words, everything, encoders.SUBWORDS[plan.bpe], model)
    for language in plan.languages:
        for split in SPLITS:
            _link(f"all/{split}.{language}", part / f"{split}.{language}")
    if not plan.tgt:
        return

    # only training pairs are dropped: a score covers the whole test set
    names = [f"train.{language}" for language in plan.languages]
    filtered = [part / name for name in names]
    for path in filtered:
        path.unlink()
    text.filter_pairs(
        [everything / name for name in names], filtered, plan.max_length, plan.max_ratio
    )


def _link(target: str, link: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def binarise(plan: Preparation, part: Path) -> None:
    """Write fairseq-preprocess's files, preparation.json, and the references as raw text."""
    for path in part.iterdir():  # fairseq-preprocess refuses a dictionary that is there already
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != KEY:
            path.unlink()

    log_file = plan.out / "fairseq-preprocess.log"
    with open(log_file, "wb") as log:
        reason = follow(_preprocess_command(plan, part), log=log)
    if reason:
        raise UserError(f"fairseq-preprocess failed: {reason}; its output is in {log_file}")

    (part / "raw").mkdir()
    for language in plan.languages:
        for split in ("valid", "test"):
            name = f"{split}.{language}"
            shutil.copyfile(plan.out / "raw" / name, part / "raw" / name)
    text.describe(part, plan.facts)


def _preprocess_command(plan: Preparation, part: Path) -> list[str]:
    """fairseq-preprocess's command line."""
    command = ["fairseq-preprocess"]
    if plan.tgt:
        command += ["--source-lang", plan.src, "--target-lang", plan.tgt]
        if plan.joined:
            command.append("--joined-dictionary")
    else:
        command.append("--only-source")
    command += ["--destdir", str(part), "--workers", str(plan.workers)]

    suffix = "" if plan.tgt else f".{plan.src}"
    for split in SPLITS:
        command += [f"--{split}pref", str(plan.out / "subwords" / f"{split}{suffix}")]
    return command
