"""The steps of data preparation that read and write text: join published parts, encode, filter pairs."""

import contextlib
import html
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from fairseq_rskip.errors import UserError
from fairseq_rskip.pretrained.text import clean
from fairseq_rskip.tools import lines
from fairseq_rskip.tools.prepare.parallel import Make, mapper

SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.I)
TITLE = re.compile(r" ?= [^=]+ = ?")  # of an article in WikiText
WARN_ABOVE = 0.05  # of the pairs, dropped by one rule


def find_part(part: str, language: str, role: str) -> str:
    """The file of a published ``part``; ``role`` is src or ref. Raises ``UserError`` with all accepted names."""
    names = [f"{part}.{language}", f"{part}.{language}.gz", f"{part}-{role}.{language}.sgm"]
    for name in names:
        if Path(name).is_file():
            return name
    raise UserError(f"none of these files exists: {', '.join(names)}")


def published(path: str) -> Iterator[str]:
    """The sentences of one published file, plain text or WMT's SGML, without a carriage return at their end."""
    if not path.endswith(".sgm"):
        return (line.rstrip("\r") for line in lines.read(path))
    return (html.unescape(text).strip() for line in lines.read(path) for text in SEGMENT.findall(line))


def collect(targets: Sequence[Path], pairs: Sequence[Sequence[str]]) -> None:
    """Join the published ``pairs`` of files into the two ``targets``. Raises ``UserError`` if two differ in length."""
    with lines.writing(targets[0]) as source_file, lines.writing(targets[1]) as target_file:
        for names in pairs:
            for source, target in lines.paired(*map(published, names), names):
                source_file.write(source + "\n")
                target_file.write(target + "\n")


def text_files(source: Path) -> list[Path]:
    """``source`` itself, or the text files in that folder. Raises ``UserError`` where there are none."""
    found = sorted(source.rglob("*.txt")) if source.is_dir() else [source]
    if not found:
        raise UserError(f"{source} holds no *.txt file")
    return found


def documents(source: Path, length: int = 0, titles: bool = False) -> Iterator[list[str]]:
    """The documents of a text, as lists of lines without blank ones: each file of a folder, or the parts of a file that
    blank lines divide, or every ``length`` lines; with ``titles``, parts that begin with a title of WikiText."""
    for path in text_files(source):
        document: list[str] = []
        for line in published(str(path)):
            blank = not line.strip()
            ends = TITLE.fullmatch(line) if titles else blank and not source.is_dir()
            if document and (ends or len(document) == length):
                yield document
                document = []
            if not blank:
                document.append(line)
        if document:
            yield document


def draw_documents(source: Path, targets: Sequence[Path], share: float, length: int, titles: bool) -> None:
    """Write the documents to the first of ``targets``, each with a blank line behind it, and ``share`` of them, drawn
    at random, to each of the others. Raises ``UserError`` where nothing is left for the first."""
    count = sum(1 for _ in documents(source, length, titles))
    held = max(1, round(share * count))
    others = len(targets) - 1
    if count <= held * others:
        raise UserError(f"{source} holds {count} documents: expected a blank line between two, or --lines N")
    drawn = random.Random(1).sample(range(count), held * others)
    place = {number: 1 + i // held for i, number in enumerate(drawn)}
    with contextlib.ExitStack() as opened:
        outputs = [opened.enter_context(lines.writing(target)) for target in targets]
        for number, document in enumerate(documents(source, length, titles)):
            outputs[place.get(number, 0)].write("\n".join([*document, "", ""]))


def make_clean() -> Callable[[str], str]:
    """An encoder that only cleans."""
    return clean


def encode(make: Make, arguments: tuple, source: Path, target: Path, names: Sequence[str], workers: int) -> None:
    """Write ``make(*arguments)(line)`` of each line of the files ``names`` to ``target``; existing files are kept."""
    with mapper(make, arguments, workers) as mapped:
        for name in [name for name in names if not (target / name).exists()]:
            bar = tqdm(desc=name, unit=" lines", unit_scale=True, disable=None)
            with lines.writing(target / name) as output, bar:
                for results in mapped(lines.read(source / name)):
                    output.writelines(result + "\n" for result in results)
                    bar.update(len(results))


def filter_pairs(sources: Sequence[Path], targets: Sequence[Path], max_length: int, max_ratio: float) -> None:
    """Keep pairs as Moses' clean-corpus-n.perl does for fairseq: 1 to ``max_length`` subwords on either side, neither
    more than ``max_ratio`` times the other. Print the share that each rule dropped."""
    empty, long, uneven = "an empty side", f"--max-length {max_length}", f"--max-ratio {max_ratio:g}"
    dropped = {empty: 0, long: 0, uneven: 0}
    count = 0
    with lines.writing(targets[0]) as source_file, lines.writing(targets[1]) as target_file:
        for source, target in lines.paired(*map(lines.read, sources), sources):
            count += 1
            shorter, longer = sorted((len(source.split()), len(target.split())))
            if shorter == 0:
                dropped[empty] += 1
            elif longer > max_length:
                dropped[long] += 1
            elif longer > max_ratio * shorter:
                dropped[uneven] += 1
            else:
                source_file.write(source + "\n")
                target_file.write(target + "\n")
        kept = count - sum(dropped.values())
        if not kept:
            raise UserError(f"none of the {count:,} training pairs is left: see --max-length and --max-ratio")
    shares = {rule: f"{100 * number / count:.1f} %" for rule, number in dropped.items()}
    summary = ", ".join(f"{share} by {rule}" for rule, share in shares.items())
    print(f"filter: kept {kept:,} of {count:,} training pairs; dropped {summary}", flush=True)
    for rule, number in dropped.items():
        if number > WARN_ABOVE * count:
            print(f"warning: {rule} drops {shares[rule]} of the training pairs ({number:,})", file=sys.stderr)
