"""The steps of data preparation that read and write text: join parts, encode, filter, describe."""

import contextlib
import functools
import hashlib
import html
import itertools
import multiprocessing
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fairseq_rskip import files as storage
from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError
from fairseq_rskip.tools import lines
from fairseq_rskip.tools.corpus import PREPARATION, SPLITS

SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.I)
TITLE = re.compile(r" ?= [^=]+ = ?")  # of an article in WikiText
CHUNK = 1000  # lines that a process gets at a time
WAITING = 16  # chunks that are read for each process at a time, which bounds the memory
# fairseq-preprocess logs
# "| [en] some/train.en: 29000 sents, 412893 tokens, 0.0% replaced (by <unk>)"
COUNTS = re.compile(r"\[(\S+)\] (.+): (\d+) sents, (\d+) tokens, ([\d.e+-]+)% replaced")
TYPES = re.compile(r"\[(\S+)\] Dictionary: (\d+) types")


def find_part(part: Path, language: str, role: str) -> Path:
    """The file of a published ``part``; ``role`` is src or ref.

    Raises ``UserError`` with all accepted names.
    """
    names = [f"{part}.{language}", f"{part}.{language}.gz", f"{part}-{role}.{language}.sgm"]
    for name in names:
        if Path(name).is_file():
            return Path(name)
    raise UserError(f"none of these files exists: {', '.join(names)}")


def published(path: Path) -> Iterator[str]:
    """The sentences of one published file, plain text or WMT's SGML, without carriage returns."""
    if path.suffix != ".sgm":
        for line in lines.read(path):
            yield line.rstrip("\r")
        return
    for line in lines.read(path):
        for sentence in SEGMENT.findall(line):
            yield html.unescape(sentence).strip()


def join_parts(prefix: Path, src: str, tgt: str, parts: Sequence[Path]) -> None:
    """Join the published ``parts`` as :func:`join` does."""
    pairs = [(find_part(part, src, "src"), find_part(part, tgt, "ref")) for part in parts]
    join(prefix, src, tgt, pairs)


def join(prefix: Path, src: str, tgt: str, pairs: Sequence[tuple[Path, Path]]) -> None:
    """Join ``pairs`` of files, source and target, into ``prefix``.SRC and ``prefix``.TGT.

    Raises ``UserError`` if a source and its target differ in length.
    """
    with (
        lines.writing(f"{prefix}.{src}") as source_file,
        lines.writing(f"{prefix}.{tgt}") as target_file,
    ):
        for pair in pairs:
            for source, target in lines.paired(*map(published, pair), pair):
                source_file.write(source + "\n")
                target_file.write(target + "\n")


def text_files(source: Path) -> list[Path]:
    """``source`` itself, or the text files in that folder. Raises ``UserError`` for none."""
    if not source.exists():
        raise UserError(
            f"{source} does not exist; expected a text file, or a folder of *.txt files"
        )
    if not source.is_dir():
        return [source]
    files = []
    for path in sorted(source.rglob("*.txt")):
        if path.is_file() and path.stat().st_size > 0:
            files.append(path)
    if not files:
        raise UserError(
            f"{source}: expected a text file, or a folder that holds *.txt files with text"
        )
    return files


def content_hash(source: Path) -> str:
    """The SHA-256 of a text: of a file, or of the text files in a folder and where each begins.

    A document of a folder ends with its file.
    """
    digest = hashlib.sha256()
    for path in text_files(source):
        if source.is_dir():
            digest.update(f"a file of {path.stat().st_size} bytes\0".encode())
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def documents(
    source: Path, document_lines: int = 0, at_titles: bool = False
) -> Iterator[list[str]]:
    """The documents of a text, as lists of non-blank lines.

    A document is a file of a folder, or the part of a file between blank lines; with
    ``document_lines`` that number of lines that are not blank, with ``at_titles`` the part before
    the next title of WikiText. It ends with its file at the latest.
    """
    for path in text_files(source):
        document: list[str] = []
        for line in published(path):
            blank = not line.strip()
            if document_lines:
                ends = len(document) == document_lines
            elif at_titles:
                ends = TITLE.fullmatch(line) is not None
            else:
                ends = blank and not source.is_dir()
            if document and ends:
                yield document
                document = []
            if not blank:
                document.append(line)
        if document:
            yield document


def draw_documents(
    source: Path,
    targets: Sequence[Path],
    held_out: float = 0.0,
    document_lines: int = 0,
    at_titles: bool = False,
) -> None:
    """Write the documents of ``source`` to the first of ``targets``, each followed by a blank line.

    ``document_lines`` and ``at_titles`` say where a document ends (:func:`documents`). The share
    ``held_out`` of them, drawn at random, goes to each of the other targets instead.
    Raises ``UserError`` where nothing is left for the first.
    """
    count = sum(1 for _ in documents(source, document_lines, at_titles))
    others = len(targets) - 1
    size = max(1, round(held_out * count))
    if count <= size * others:
        raise UserError(
            f"expected at least {size * others + 1} documents in {source}, found {count}: "
            f"{_more_documents(source, held_out, count)}"
        )
    target_of = {}  # number of a held-out document -> the target that gets it
    for order, number in enumerate(random.Random(1).sample(range(count), size * others)):
        target_of[number] = 1 + order // size
    with contextlib.ExitStack() as opened:
        outputs = [opened.enter_context(lines.writing(target)) for target in targets]
        for number, document in enumerate(documents(source, document_lines, at_titles)):
            output = outputs[target_of.get(number, 0)]
            output.write("\n".join([*document, "", ""]))


def _more_documents(source: Path, held_out: float, count: int) -> str:
    """What to do where too few documents are left for the training."""
    if count > 2:
        return f"give a smaller --held-out than {held_out:g}"
    if source.is_dir():
        return "every file is a document, so add files"
    return "put a blank line after each, or give --lines N for documents of N lines"


@contextlib.contextmanager
def mapper(
    make: Callable, arguments: tuple, workers: int
) -> Iterator[Callable[[Iterable[str]], Iterator[str]]]:
    """A function from lines to ``make(*arguments)(line)`` of each, in order.

    ``make`` is called in each process. Raises ``UserError`` where one of them is killed.
    """
    # here first: its errors are reported, and workers that are forked inherit its imports
    function = make(*arguments)
    if workers == 1:
        yield functools.partial(map, function)
        return

    pool = ProcessPoolExecutor(workers, initializer=_start, initargs=(make, arguments))

    def mapped(unread: Iterable[str]) -> Iterator[str]:
        unread = iter(unread)
        # pool.map would read all of its input first
        while block := list(itertools.islice(unread, CHUNK * WAITING * workers)):
            yield from pool.map(_run, block, chunksize=CHUNK)

    try:
        yield mapped
    except BrokenProcessPool:
        raise UserError(
            "one of the processes was killed, perhaps out of memory: give a smaller --workers; "
            "the same command resumes"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(make: Callable, arguments: tuple) -> None:
    """Set up a worker: it ends with its parent, which handles Ctrl-C."""
    global _function
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _function = make(*arguments)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _run(line: str) -> str:
    return _function(line)


def encode(
    source: Path, target: Path, names: Sequence[str], workers: int, make: Callable, arguments: tuple
) -> None:
    """Write the lines of the files ``names`` in ``source``, encoded, to ``target``.

    Existing files stay. ``make(*arguments)`` is the encoder, a function from line to line.
    """
    missing = [name for name in names if not (target / name).exists()]
    if not missing:
        return
    with mapper(make, arguments, workers) as mapped:
        for name in missing:
            with lines.writing(target / name) as output:
                encoded = mapped(lines.read(source / name))
                for line in tqdm(encoded, desc=name, unit=" lines", unit_scale=True, disable=None):
                    output.write(line + "\n")


def filter_pairs(
    sources: Sequence[Path], targets: Sequence[Path], max_length: int, max_ratio: float
) -> None:
    """Drop training pairs by the rules of Moses' clean-corpus-n.perl, as fairseq's scripts do.

    Each side has 1 to ``max_length`` subwords, and at most ``max_ratio`` times the other's.
    Prints how many each rule dropped.
    """
    empty = "an empty side"
    long = f"--max-length {max_length}"
    uneven = f"--max-ratio {max_ratio:g}"
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
            raise UserError(
                f"none of the {count:,} training pairs is left: see --max-length and --max-ratio"
            )
    shares = [
        f"{number:,} ({100 * number / count:.1f} %) by {rule}" for rule, number in dropped.items()
    ]
    print_line(f"filter: kept {kept:,} of {count:,} training pairs; dropped {', '.join(shares)}")


def describe(data_bin: Path, facts: dict[str, Any]) -> None:
    """Write DATA-BIN/preparation.json, which training and evaluation read.

    It has ``facts``, and from fairseq-preprocess's log ``dictionary_types`` by language and
    ``splits``, each with its pairs and by language its tokens and unknown words. Raises
    ``UserError``.
    """
    log = (data_bin / "preprocess.log").read_text(encoding="utf-8")
    log = log.replace("[None]", f"[{facts['src']}]")  # fairseq's name for a text's language
    splits: dict[str, dict[str, Any]] = {}
    for language, path, sentences, tokens, unknown in COUNTS.findall(log):
        name = Path(path).name.rpartition(".")[0]
        split = splits.setdefault(
            name, {"pairs": int(sentences), "tokens": {}, "unknown_percent": {}}
        )
        split["tokens"][language] = int(tokens)
        split["unknown_percent"][language] = float(unknown)
    missing = set(SPLITS) - splits.keys()
    if missing:
        raise UserError(f"fairseq-preprocess logged no counts for {', '.join(sorted(missing))}")
    types = {language: int(count) for language, count in TYPES.findall(log)}
    storage.write_json(
        data_bin / PREPARATION, {**facts, "dictionary_types": types, "splits": splits}
    )
