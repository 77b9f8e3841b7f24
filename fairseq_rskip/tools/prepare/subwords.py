"""Learn subwords from the training text: subword-nmt's merges, or a BPE model of sentencepiece."""

import contextlib
import functools
import io
import itertools
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fairseq_rskip import files
from fairseq_rskip.console import print_line
from fairseq_rskip.errors import UserError, exit_status
from fairseq_rskip.machine import all_cores
from fairseq_rskip.tools import lines
from fairseq_rskip.tools.process import follow

# Limits that save gigabytes of memory: merges are learned from the most frequent distinct words;
MOST_TYPES = 400_000
# with more distinct words than this, counting forgets those seen once;
MOST_COUNTED = 4_000_000
# sentencepiece draws at most this number of sentences at random.
MOST_SENTENCES = 1_000_000
# Bytes of a line above which sentencepiece leaves it out. Its own default is for published corpora:
# the archived studies' subwords were learned without 17 long lines of sotu.
LONGEST_LINE, LONGEST_PUBLISHED_LINE = 2**30, 4192
# least number of training pairs or lines -> number of subwords of each kind
SIZES = {
    100_000: {"subword-nmt": 32_000, "sentencepiece": 8_000},
    20_000: {"subword-nmt": 6_000, "sentencepiece": 4_000},
    5_000: {"subword-nmt": 3_000, "sentencepiece": 2_000},
}
SMALLEST = {"subword-nmt": 1_000, "sentencepiece": 500}


def count_words(texts: Sequence[Path]) -> Counter[str]:
    """How often each word of the files occurs."""
    counts: Counter[str] = Counter()
    for line in itertools.chain.from_iterable(map(lines.read, texts)):
        counts.update(line.split(" "))
        if len(counts) > MOST_COUNTED:
            counts = Counter({word: count for word, count in counts.items() if count > 1})
    counts.pop("", None)
    return counts


def learn_subword_nmt(texts: Sequence[Path], model: Path, size: int) -> None:
    """Write at most ``size`` merge operations to ``model``. Raises ``UserError`` for none."""
    from subword_nmt.learn_bpe import learn_bpe

    words = [f"{word} {count}\n" for word, count in count_words(texts).most_common(MOST_TYPES)]
    shown = sys.stderr if sys.stderr.isatty() else io.StringIO()  # it draws a progress bar anywhere
    with lines.writing(model) as output, contextlib.redirect_stderr(shown):
        try:
            learn_bpe(words, output, size, is_dict=True)
        except ValueError:  # max() of no pairs
            names = " and ".join(map(str, texts))
            raise UserError(f"no two symbols to merge in {names}: expected --bpe none") from None
    learned = sum(1 for _ in lines.read(model)) - 1  # below the line of the version
    if learned < size:
        print_line(
            f"subword-nmt: {learned} merges learned, not {size}: "
            "no further pair of symbols occurs twice"
        )


def learn_sentencepiece(
    texts: Sequence[Path], model: Path, size: int, longest_line: int = LONGEST_LINE
) -> None:
    """Write a BPE model of at most ``size`` pieces to ``model``.

    Lines of more bytes than ``longest_line`` are left out. Raises ``UserError`` for fewer pieces
    than the text has characters. This runs in another process, because sentencepiece does not end
    on a signal.
    """
    from sentencepiece import SentencePieceProcessor

    module = "fairseq_rskip.tools.prepare.subwords"
    words = [sys.executable, "-m", module, str(size), str(longest_line), str(model)]
    words += map(str, texts)
    reason = follow(words, on_line=lambda line: None)
    if reason:
        raise UserError(f"the subwords of {model} are not learned: {reason}")
    learned = SentencePieceProcessor(model_file=str(model)).get_piece_size()
    if learned < size:
        print_line(f"sentencepiece: {learned} subwords learned, not {size}: the text has no more")


def _train_sentencepiece(texts: Sequence[Path], model: Path, size: int, longest_line: int) -> None:
    """Write the model; of a text that has fewer pieces than ``size``, with all that it has."""
    import sentencepiece

    sentencepiece.set_random_generator_seed(1)
    content = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=itertools.chain.from_iterable(map(lines.read, texts)),
            model_writer=content,
            vocab_size=size,
            model_type="bpe",
            character_coverage=1.0,
            normalization_rule_name="identity",  # NFKC, its default, would change references
            input_sentence_size=MOST_SENTENCES,
            max_sentence_length=longest_line,
            shuffle_input_sentence=True,
            num_threads=all_cores(),
            minloglevel=2,
        )
    except RuntimeError as error:
        # its message ends in what is possible: "... set it to a value <= 1234."
        reason = str(error).split("] ")[-1].rstrip(".")
        largest = re.search(r"<= (\d+)$", reason)
        if largest and int(largest[1]) < size:
            return _train_sentencepiece(texts, model, int(largest[1]), longest_line)
        raise UserError(
            f"sentencepiece with {size} subwords: {reason}; --bpe-size N changes it"
        ) from None
    files.write_bytes(model, content.getbuffer())


def size_for(kind: str, count: int, characters: int) -> int:
    """The number of subwords for ``count`` training pairs or lines: it grows with the text.

    Published settings have 6,000 merges for Multi30k (29,000 pairs), and 32,000 for EN-VI (133,000)
    and for larger corpora. sentencepiece counts the text's distinct ``characters`` among them,
    which alone may be more in Chinese: half of the subwords are more than a character.
    """
    size = SMALLEST[kind]
    for least, sizes in SIZES.items():
        if count >= least:
            size = sizes[kind]
            break
    return max(size, 2 * characters) if kind == "sentencepiece" else size


def count_characters(texts: Sequence[Path]) -> int:
    """The number of distinct characters in the files."""
    characters: set[str] = set()
    for line in itertools.chain.from_iterable(map(lines.read, texts)):
        characters.update(line)
    return len(characters)


LEARNERS = {"subword-nmt": learn_subword_nmt, "sentencepiece": learn_sentencepiece}

if __name__ == "__main__":
    size, longest_line, model, *texts = sys.argv[1:]
    paths = [Path(text) for text in texts]
    learn = functools.partial(
        _train_sentencepiece, paths, Path(model), int(size), int(longest_line)
    )
    sys.exit(exit_status(learn))
