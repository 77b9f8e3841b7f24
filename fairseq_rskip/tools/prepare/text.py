"""The steps of data preparation that read and write text: join published parts, encode, filter pairs, describe."""

import contextlib
import functools
import html
import itertools
import json
import multiprocessing
import os
import random
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fairseq_rskip import files as storage
from fairseq_rskip.errors import UserError
from fairseq_rskip.pretrained import text as encoders
from fairseq_rskip.tools import lines

SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.I)
TITLE = re.compile(r" ?= [^=]+ = ?")  # of an article in WikiText
CHUNK = 1000  # lines that a process gets at a time
WAITING = 16  # chunks that are read for each process at a time, which bounds the memory
# "| [en] some/train.en: 29000 sents, 412893 tokens, 0.0% replaced (by <unk>)", as fairseq-preprocess logs it
COUNTS = re.compile(r"\[(\S+)\] (.+): (\d+) sents, (\d+) tokens, ([\d.e+-]+)% replaced")
TYPES = re.compile(r"\[(\S+)\] Dictionary: (\d+) types")


def make_clean() -> Callable[[str], str]:
    """An encoder that only cleans."""
    return encoders.clean


# step -> the function that makes its encoder, and the options it takes
ENCODERS: dict[str, tuple[Callable[..., Callable[[str], str]], list[str]]] = {
    "clean": (make_clean, []),
    "moses": (encoders.make_moses, ["lang", "normalise_punctuation"]),
    "subword-nmt": (encoders.make_subword_nmt, ["model"]),
    "sentencepiece": (encoders.make_sentencepiece, ["model"]),
}


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


def join_parts(prefix: str, src: str, tgt: str, *parts: str) -> None:
    """Join the published ``parts`` as :func:`join` does."""
    join(prefix, src, tgt, *(find_part(part, *each) for part in parts for each in ((src, "src"), (tgt, "ref"))))


def join(prefix: str, src: str, tgt: str, *files: str) -> None:
    """Join ``files``, a source, its target, and so on, into ``prefix``.SRC and .TGT. Raises ``UserError`` if a source
    and its target differ in length."""
    with lines.writing(f"{prefix}.{src}") as source_file, lines.writing(f"{prefix}.{tgt}") as target_file:
        for names in zip(files[::2], files[1::2]):
            for source, target in lines.paired(*map(published, names), names):
                source_file.write(source + "\n")
                target_file.write(target + "\n")


def text_files(source: Path) -> list[Path]:
    """``source`` itself, or the text files in that folder. Raises ``UserError`` where there are none."""
    sources = sorted(source.rglob("*.txt")) if source.is_dir() else [source]
    if not sources or not sources[0].exists():
        raise UserError(f"{source}: expected a text file, or a folder that holds *.txt files")
    return sources


def documents(source: Path, ends: str = "") -> Iterator[list[str]]:
    """The documents of a text, as lists of non-blank lines: each file of a folder, or the parts of a file between blank
    lines. With a number as ``ends``, a document has so many lines; with "titles", it begins at a title of WikiText."""
    length = int(ends) if ends.isdecimal() else 0
    for path in text_files(source):
        document: list[str] = []
        for line in published(str(path)):
            blank = not line.strip()
            end = TITLE.fullmatch(line) if ends == "titles" else blank and not source.is_dir()
            if document and (end or len(document) == length):
                yield document
                document = []
            if not blank:
                document.append(line)
        if document:
            yield document


def draw_documents(source: Path, targets: Sequence[Path], held_out: float, ends: str) -> None:
    """Write the documents to the first of ``targets``, each with a blank line behind it, and the share ``held_out`` of
    them, drawn at random, to each of the others. Raises ``UserError`` where nothing is left for the first."""
    count, others = sum(1 for _ in documents(source, ends)), len(targets) - 1
    size = max(1, round(held_out * count))
    if count <= size * others:
        raise UserError(f"{source} holds {count} documents: expected a blank line between two, or --lines N")
    drawn = random.Random(1).sample(range(count), size * others)
    place = {number: 1 + i // size for i, number in enumerate(drawn)}
    with contextlib.ExitStack() as opened:
        outputs = [opened.enter_context(lines.writing(target)) for target in targets]
        for number, document in enumerate(documents(source, ends)):
            outputs[place.get(number, 0)].write("\n".join([*document, "", ""]))


def all_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def mapper(make: Callable, arguments: tuple, workers: int) -> Iterator[Callable[[Iterable[str]], Iterator[str]]]:
    """A function from lines to ``make(*arguments)(line)`` of each, in order; ``make`` is called in each process."""
    function = make(*arguments)  # here first: workers inherit its imports, and its errors are reported

    def mapped(lines: Iterable[str]) -> Iterator[str]:
        lines = iter(lines)
        while block := list(itertools.islice(lines, CHUNK * WAITING * workers)):  # map reads all of its input first
            yield from pool.map(_run, block, chunksize=CHUNK)

    if workers == 1:
        yield functools.partial(map, function)
    else:
        with ProcessPoolExecutor(workers, initializer=_start, initargs=(make, arguments)) as pool:
            yield mapped


def _start(make: Callable, arguments: tuple) -> None:
    global _function
    _function = make(*arguments)
    parent = multiprocessing.parent_process().sentinel
    threading.Thread(target=lambda: wait([parent]) and os._exit(1), daemon=True).start()  # a worker ends with it


def _run(line: str) -> str:
    return _function(line)


def encode(step: str, source: Path, target: Path, names: Sequence[str], workers: int, **options: Any) -> None:
    """Write the encoded lines of the files ``names`` in ``source`` to ``target``; existing files are kept."""
    make, needed = ENCODERS[step]
    with mapper(make, tuple(options[name] for name in needed), workers) as mapped:
        for name in [name for name in names if not (target / name).exists()]:
            with lines.writing(target / name) as output:
                results = mapped(lines.read(source / name))
                shown = tqdm(results, desc=name, unit=" lines", unit_scale=True, disable=None)
                output.writelines(result + "\n" for result in shown)


def filter_pairs(sources: Sequence[Path], targets: Sequence[Path], max_length: int, max_ratio: float) -> None:
    """Keep pairs as Moses' clean-corpus-n.perl does for fairseq: 1 to ``max_length`` subwords on either side, neither
    more than ``max_ratio`` times the other. Print the share that each rule dropped."""
    empty, long, uneven = "an empty side", f"--max-length {max_length}", f"--max-ratio {max_ratio:g}"
    dropped, count = {empty: 0, long: 0, uneven: 0}, 0
    with lines.writing(targets[0]) as source_file, lines.writing(targets[1]) as target_file:
        for source, target in lines.paired(*map(lines.read, sources), sources):
            count += 1
            shorter, longer = sorted((len(source.split()), len(target.split())))
            if shorter and longer <= max_length and longer <= max_ratio * shorter:
                source_file.write(source + "\n")
                target_file.write(target + "\n")
            else:
                dropped[empty if not shorter else long if longer > max_length else uneven] += 1
        kept = count - sum(dropped.values())
        if not kept:
            raise UserError(f"none of the {count:,} training pairs is left: see --max-length and --max-ratio")
    summary = ", ".join(f"{100 * number / count:.1f} % by {rule}" for rule, number in dropped.items())
    print(f"filter: kept {kept:,} of {count:,} training pairs; dropped {summary}", flush=True)


def describe(data_bin: str, facts: str) -> None:
    """Write DATA-BIN/preparation.json, which training and evaluation read: ``facts``, which are JSON, and what
    fairseq-preprocess logged: ``dictionary_types`` by language, and ``splits``, each with its pairs and by language its
    tokens and unknown words. Raises ``UserError``."""
    known, splits = json.loads(facts), {}
    log = Path(data_bin, "preprocess.log").read_text(encoding="utf-8")
    log = log.replace("[None]", f"[{known['src']}]")  # as fairseq-preprocess calls the language of a text
    for lang, path, sentences, tokens, unknown in COUNTS.findall(log):
        split: dict[str, Any] = {"pairs": int(sentences), "tokens": {}, "unknown_percent": {}}
        split = splits.setdefault(Path(path).name.rpartition(".")[0], split)
        split["tokens"][lang] = int(tokens)
        split["unknown_percent"][lang] = float(unknown)
    if missing := {"train", "valid", "test"} - splits.keys():
        raise UserError(f"fairseq-preprocess logged no counts for {', '.join(sorted(missing))}")
    types = {lang: int(count) for lang, count in TYPES.findall(log)}
    storage.write_json(Path(data_bin, "preparation.json"), {**known, "dictionary_types": types, "splits": splits})
