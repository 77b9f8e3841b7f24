"""An exported translation model: fairseq's generator behind plain text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fairseq.dataclass.configs import FairseqConfig, GenerationConfig
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf

import fairseq_rskip.models  # noqa: F401  (registers the architectures)
from fairseq_rskip.compat import unknown_architecture
from fairseq_rskip.errors import UserError

from . import check_positions, fill, required, text

MAX_TOKENS = 8000  # of a batch
POSITIONS = ("max_source_positions", "max_target_positions")
# At least: weights and biases of self-attention, and of the two matrices behind it.
TENSORS_PER_LAYER = 12
# subwords as config.json names them -> what makes the function that splits
SUBWORDS = {"subword-nmt": text.make_subword_nmt, "sentencepiece": text.make_sentencepiece}


class Translator(GeneratorHubInterface):
    """A trained Transformer with its corpus's way from plain text to tokens and back.

    ``config`` is the content of config.json, ``folder`` holds dictionaries and subwords. fairseq's
    interface (``generate``, ``encode``, ``decode``) works on plain text, too.
    """

    def __init__(self, config: dict[str, Any], folder: Path, task: TranslationTask, model: Any):
        cfg = OmegaConf.structured(FairseqConfig)
        cfg.generation = OmegaConf.merge(cfg.generation, config["search"])
        cfg.dataset.max_tokens = max(MAX_TOKENS, *model.max_positions())
        super().__init__(cfg, task, [model])
        self.config = config
        self.languages = (config["source"], config["target"])
        self.to_tokens = splitter(config, folder)
        self.from_tokens = detokeniser(config, config["target"])

    def translate(
        self,
        sentences: str | list[str],
        beam: int | None = None,
        verbose: bool = False,
        **search: Any,
    ) -> str | list[str]:
        """The best translation of each sentence, plain text to plain text.

        ``beam`` and ``search`` (``lenpen``, ``max_len_b``, other options of fairseq-generate)
        default to the export's, which are those of ``rskip evaluate``. Raises ``UserError`` for an
        option that fairseq does not have, or a sentence longer than the model takes.
        """
        unknown = sorted(set(search) - set(GenerationConfig.__dataclass_fields__))
        if unknown:
            raise UserError(f"fairseq has no option {', '.join(unknown)} of its search")
        return super().translate(sentences, beam or self.cfg.generation.beam, verbose, **search)

    def encode(self, sentence: str) -> torch.Tensor:
        """Token numbers of plain text, end of sentence included. Raises ``UserError`` for more than
        the model takes.
        """
        tokens = self.binarize(self.to_tokens(sentence))
        if len(tokens) > self.max_positions[0]:
            raise UserError(
                f"{sentence[:40]!r}... has {len(tokens)} tokens, "
                f"the model takes {self.max_positions[0]}"
            )
        return tokens

    def decode(self, tokens: torch.Tensor) -> str:
        """Plain text of token numbers: subwords joined, and detokenised where the corpus was
        tokenised.
        """
        words = self.tgt_dict.string(tokens, text.POST_PROCESS[self.config["bpe"]])
        return self.from_tokens(words)


def load(folder: Path, config: dict[str, Any]) -> Translator:
    """The translator that ``config`` describes, with the files in ``folder``. Raises
    ``UserError``.
    """
    check_positions(folder, config["model"], POSITIONS)
    languages = (config["source"], config["target"])
    name = config["architecture"]
    if name not in MODEL_DATACLASS_REGISTRY:
        raise unknown_architecture(name)
    settings = OmegaConf.merge(MODEL_DATACLASS_REGISTRY[name](), {**config["model"], "_name": name})
    task = make_task(folder, languages, config["model"])
    layers = max(settings.encoder_layers, settings.decoder_layers)
    model = fill(lambda: task.build_model(settings), layers, folder, TENSORS_PER_LAYER)
    return Translator(config, folder, task, model)


def make_task(
    folder: Path, languages: tuple[str, str], settings: dict[str, Any]
) -> TranslationTask:
    """fairseq's task with the dictionaries in ``folder``. Raises ``UserError`` for one that is
    missing or broken.
    """
    dictionaries = []
    for language in languages:
        path = required(folder, f"dict.{language}.txt")
        try:
            dictionaries.append(TranslationTask.load_dictionary(str(path)))
        except Exception as error:  # fairseq raises bare ones
            reason = " ".join(str(error).split())[:150]
            raise UserError(f"{path} is not a dictionary of fairseq: {reason}") from None
    limits = {name: settings[name] for name in POSITIONS}
    return TranslationTask(
        TranslationConfig(source_lang=languages[0], target_lang=languages[1], **limits),
        *dictionaries,
    )


def detokeniser(config: dict[str, Any], language: str) -> Callable[[str], str]:
    """A function that turns tokens separated by blanks into plain text, as the corpus was
    prepared.
    """
    if config["tokenizer"] == "moses":
        return text.make_detokenise(language)
    return str


def splitter(config: dict[str, Any], folder: Path) -> Callable[[str], str]:
    """A function that turns a plain source sentence into tokens separated by blanks, as the corpus
    was prepared.
    """
    language = config["source"]
    tokenise: Callable[[str], str] = text.clean
    if config["tokenizer"] == "moses":
        tokenise = text.make_moses(language, config["normalise_punctuation"])
    if config["bpe"] == "none":
        return tokenise
    make_subwords = SUBWORDS[config["bpe"]]
    split = make_subwords(required(folder, config["subwords"][language]))
    return lambda sentence: split(tokenise(sentence))
