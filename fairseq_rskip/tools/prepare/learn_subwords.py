"""Learn subwords from the training text: merge operations of subword-nmt, or a BPE model of sentencepiece."""

import collections
import contextlib
import io
import itertools
import sys
from collections import Counter
from pathlib import Path

from fairseq_rskip import files
from fairseq_rskip.console import Parser, whole_number
from fairseq_rskip.errors import RESUME, UserError, exit_status
from fairseq_rskip.tools import lines
from fairseq_rskip.tools.prepare import parallel

MOST_TYPES = 400_000  # distinct words that merges are learned from, the most frequent; the rest would cost gigabytes
MOST_COUNTED = 4_000_000  # distinct words while they are counted; beyond it, those seen once are forgotten
MOST_SENTENCES = 1_000_000  # that sentencepiece draws at random, for the same reason


def count_words(texts: list[str]) -> Counter[str]:
    """How often each word of the files occurs."""
    counts = collections.Counter()
    for text in texts:
        for line in lines.read(text):
            counts.update(line.split(" "))
            if len(counts) > MOST_COUNTED:
                counts = collections.Counter({word: count for word, count in counts.items() if count > 1})
    counts.pop("", None)
    return counts


def learn_subword_nmt(texts: list[str], model: Path, size: int) -> None:
    from subword_nmt.learn_bpe import learn_bpe

    counts = count_words(texts)
    if not counts:
        raise UserError(f"nothing to learn from in {' and '.join(texts)}")
    words = [f"{word} {count}\n" for word, count in counts.most_common(MOST_TYPES)]
    counts.clear()
    with lines.writing(model) as output, contextlib.ExitStack() as quiet:
        if not sys.stderr.isatty():  # its progress bar does not look
            quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
        try:
            learn_bpe(words, output, size, is_dict=True)
        except ValueError:  # of the largest of no pairs
            raise UserError(f"no two symbols to merge in {' and '.join(texts)}: expected --bpe none") from None
    learned = sum(1 for _ in lines.read(model)) - 1  # below the line of the version
    if learned < size:
        print(f"subword-nmt: {learned} merges learned, not {size}: no further pair of symbols occurs twice")


def learn_sentencepiece(texts: list[str], model: Path, size: int) -> None:
    import sentencepiece

    sentencepiece.set_random_generator_seed(1)
    content = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=itertools.chain.from_iterable(lines.read(text) for text in texts),
            model_writer=content,
            vocab_size=size,
            model_type="bpe",
            character_coverage=1.0,
            normalization_rule_name="identity",  # NFKC, its default, would take the references' own characters away
            input_sentence_size=MOST_SENTENCES,
            shuffle_input_sentence=True,
            num_threads=parallel.all_cores(),
            minloglevel=2,
        )
    except RuntimeError as error:  # its message ends in what is possible: "... set it to a value <= 1234."
        raise UserError(f"sentencepiece with {size} subwords: {str(error).split('] ')[-1]}") from None
    files.write_atomically(model, lambda file: file.write(content.getbuffer()))


LEARNERS = {"subword-nmt": learn_subword_nmt, "sentencepiece": learn_sentencepiece}


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("kind", choices=sorted(LEARNERS))
    parser.add_argument("--size", type=whole_number(1), required=True, help="merges, or sentencepiece's vocabulary")
    parser.add_argument("--model", type=Path, required=True, help="file to write")
    parser.add_argument("texts", nargs="+", help="training text; several files make one joint model")
    options = parser.parse_args(argv)
    LEARNERS[options.kind](options.texts, options.model, options.size)


if __name__ == "__main__":
    sys.exit(exit_status(main, RESUME))
