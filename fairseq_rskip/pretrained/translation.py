"""An exported translation model: fairseq's generator behind plain text."""

import numbers
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fairseq.tasks.translation import TranslationConfig, TranslationTask
from torch import Tensor

from fairseq_rskip.errors import UserError

from . import check_positions, required
from .hub import TextModel, build, check_search, read_dictionary
from .text import clean

MAX_TOKENS = 8000  # of a batch
POSITIONS = ("max_source_positions", "max_target_positions")


class Translator(TextModel):
    """A trained Transformer with its corpus's way from plain text to tokens and back."""

    def __init__(self, config: dict[str, Any], folder: Path, task: TranslationTask, model: Any):
        super().__init__(config, folder, task, model)
        self.cfg.dataset.max_tokens = max(MAX_TOKENS, *model.max_positions())
        self.languages = (config["source"], config["target"])

    def score(self, *arguments: Any, **options: Any) -> None:
        """Raise ``UserError``: fairseq would score a sentence as its own translation."""
        raise UserError("a translation model has translate(sentences), and no score(text)")

    def translate(
        self,
        sentences: str | list[str],
        beam: int | None = None,
        verbose: bool = False,
        **search: Any,
    ) -> str | list[str]:
        """The best translation of each sentence, plain text to plain text.

        ``beam`` and ``search`` (``lenpen``, ``max_len_b``, other options of fairseq-generate)
        default to the export's, which are those of ``rskip evaluate``. An empty sentence stays
        empty. Raises ``UserError`` for an option that fairseq does not have, or a sentence longer
        than the model takes.
        """
        check_search(search)
        beam = self.cfg.generation.beam if beam is None else beam
        if isinstance(beam, bool) or not isinstance(beam, numbers.Integral) or beam < 1:
            raise UserError(f"beam={beam!r}: expected an integer > 0")
        is_one = isinstance(sentences, str)
        is_list = isinstance(sentences, Iterable) and not is_one
        texts: list[Any] = list(sentences) if is_list else [sentences]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"sentences={str(sentences)[:40]}: expected a text or a list of texts")

        translations = [""] * len(texts)  # of an empty sentence
        filled = [index for index, text in enumerate(texts) if clean(text)]
        if filled:
            to_translate = [texts[index] for index in filled]
            found = super().translate(to_translate, int(beam), verbose, **search)
            for index, translation in zip(filled, found):
                translations[index] = translation
        return translations[0] if is_one else translations

    def encode(self, sentence: str) -> Tensor:
        """Token numbers of plain text, end of sentence included. Raises ``UserError`` for more than
        the model takes.
        """
        tokens = super().encode(sentence)
        if len(tokens) > self.max_positions[0]:
            raise UserError(
                f"{sentence[:40]!r}... has {len(tokens)} tokens, "
                f"the model takes {self.max_positions[0]}"
            )
        return tokens


def load(folder: Path, config: dict[str, Any]) -> Translator:
    """The translator that ``config`` describes, with the files in ``folder``. Raises
    ``UserError``.
    """
    check_positions(folder, config["model"], POSITIONS)
    task = make_task(folder, (config["source"], config["target"]), config["model"])
    return Translator(config, folder, task, build(folder, config, task))


def make_task(
    folder: Path, languages: tuple[str, str], settings: dict[str, Any]
) -> TranslationTask:
    """fairseq's task with the dictionaries in ``folder``. Raises ``UserError`` for one that is
    missing or broken.
    """
    paths = [required(folder, f"dict.{language}.txt") for language in languages]
    dictionaries = [read_dictionary(path) for path in paths]
    limits = {name: settings[name] for name in POSITIONS}
    source, target = languages
    translation = TranslationConfig(source_lang=source, target_lang=target, **limits)
    return TranslationTask(translation, *dictionaries)
