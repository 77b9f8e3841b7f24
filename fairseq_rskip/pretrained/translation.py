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
from fairseq_rskip.errors import UserError

from . import CONFIG, load_weights, text

MAX_TOKENS = 8000  # of a batch


class Translator(GeneratorHubInterface):
    """A trained Transformer, and the way from plain text to its tokens and back that its corpus was prepared by.

    ``config`` is the content of config.json. What fairseq's interface has (``generate``, ``encode``, ``decode``) holds.
    """

    def __init__(self, config: dict[str, Any], task: TranslationTask, model: Any, split: Callable[[str], str]):
        cfg = OmegaConf.structured(FairseqConfig)
        cfg.generation = OmegaConf.merge(cfg.generation, config["search"])
        cfg.dataset.max_tokens = max(MAX_TOKENS, *model.max_positions())
        super().__init__(cfg, task, [model])
        self.config = config
        self.to_tokens = split
        self.languages = (task.cfg.source_lang, task.cfg.target_lang)

    def translate(
        self, sentences: str | list[str], beam: int | None = None, verbose: bool = False, **search: Any
    ) -> str | list[str]:
        """The best translation of each sentence, plain text to plain text.

        ``beam`` and ``search`` (``lenpen``, ``max_len_b``, other options of fairseq-generate) are those of the export
        unless given, which are those of ``rskip evaluate``. Raises ``UserError`` for an option that fairseq has not, or
        a sentence longer than the model takes.
        """
        unknown = sorted(set(search) - set(GenerationConfig.__dataclass_fields__))
        if unknown:
            raise UserError(f"fairseq has no option {', '.join(unknown)} of its search")
        return super().translate(sentences, beam or self.cfg.generation.beam, verbose, **search)

    def encode(self, sentence: str) -> torch.Tensor:
        """Token numbers of plain text, its end counted. Raises ``UserError`` for more than the model takes."""
        tokens = self.binarize(self.to_tokens(sentence))
        if len(tokens) > self.max_positions[0]:
            raise UserError(f"{sentence[:40]!r}... has {len(tokens)} tokens, the model takes {self.max_positions[0]}")
        return tokens

    def decode(self, tokens: torch.Tensor) -> str:
        """Plain text of token numbers: subwords joined, and detokenised where the corpus was tokenised."""
        words = self.tgt_dict.string(tokens, text.POST_PROCESS[self.config["bpe"]])
        if self.config["tokenizer"] != "moses":
            return words
        return text.detokenise([words], self.languages[1])[0]


def load(folder: Path, config: dict[str, Any]) -> Translator:
    """The translator that ``config`` describes, with the files in ``folder``. Raises ``UserError``."""
    try:
        languages = (config["source"], config["target"])
        name = config["architecture"]
        settings = OmegaConf.merge(MODEL_DATACLASS_REGISTRY[name](), {**config["model"], "_name": name})
        paths = [folder / f"dict.{language}.txt" for language in languages]
        split = splitter(config, folder)
    except (KeyError, TypeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{folder / CONFIG} describes no translation model of this version: {reason}") from None
    for path in paths:
        if not path.is_file():
            raise UserError(f"{folder} is not an exported model: {path.name} is missing")
    limits = {name: config["model"][name] for name in ("max_source_positions", "max_target_positions")}
    task_config = TranslationConfig(source_lang=languages[0], target_lang=languages[1], **limits)
    task = TranslationTask(task_config, *(TranslationTask.load_dictionary(str(path)) for path in paths))
    model = task.build_model(settings)
    load_weights(model, folder)
    return Translator(config, task, model, split)


def splitter(config: dict[str, Any], folder: Path) -> Callable[[str], str]:
    """What turns a plain source sentence into its tokens, separated by blanks, as the corpus was prepared."""
    language = config["source"]
    tokenise = text.clean
    if config["tokenizer"] == "moses":
        tokenise = text.make_moses(language, config["normalise_punctuation"])
    if config["bpe"] == "none":
        return tokenise
    path = folder / config["subwords"][language]
    if not path.is_file():
        raise UserError(f"{folder} is not an exported model: {path.name} is missing")
    make = {"subword-nmt": text.make_subword_nmt, "sentencepiece": text.make_sentencepiece}[config["bpe"]]
    subwords = make(path)
    return lambda sentence: subwords(tokenise(sentence))
