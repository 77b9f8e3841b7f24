"""What exported translation and language models share: plain text to tokens, and back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from fairseq.dataclass.configs import FairseqConfig, GenerationConfig
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf
from torch import Tensor

import fairseq_rskip.models  # noqa: F401  (registers the architectures)
from fairseq_rskip.compat import unknown_architecture
from fairseq_rskip.errors import UserError

from . import fill, required, text

# At least: weights and biases of self-attention, and of the two matrices behind it.
TENSORS_PER_LAYER = 12


class TextModel(GeneratorHubInterface):
    """A trained model with its corpus's way from plain text to tokens and back.

    ``config`` is the content of config.json, ``folder`` holds dictionaries and subwords. fairseq's
    interface (``generate``, ``encode``, ``decode``) works on plain text, too.
    """

    def __init__(self, config: dict[str, Any], folder: Path, task: FairseqTask, model: Any):
        cfg = OmegaConf.structured(FairseqConfig)
        cfg.generation = OmegaConf.merge(cfg.generation, config["search"])
        super().__init__(cfg, task, [model])
        self.config = config
        self.to_tokens = splitter(config, folder)
        self.from_tokens = detokeniser(config)

    def encode(self, sentence: str) -> Tensor:
        """Token numbers of a line of plain text, its end included."""
        return self.binarize(self.to_tokens(sentence))

    def decode(self, tokens: Tensor) -> str:
        """Plain text of token numbers: subwords joined, and detokenised where the corpus was
        tokenised.
        """
        words = self.tgt_dict.string(tokens, text.POST_PROCESS[self.config["bpe"]])
        return self.from_tokens(words)


def check_search(options: dict[str, Any]) -> None:
    """Raise ``UserError`` for an option that fairseq's search does not have or take."""
    unknown = sorted(set(options) - set(GenerationConfig.__dataclass_fields__))
    if unknown:
        raise UserError(f"fairseq has no option {', '.join(unknown)} of its search")
    temperature = options.get("temperature", 1.0)
    if not temperature > 0:
        raise UserError(f"temperature={temperature}: expected a number above 0")


def build(folder: Path, config: dict[str, Any], task: FairseqTask) -> Any:
    """The model that ``config`` describes, with the weights in ``folder``. Raises ``UserError``."""
    name = config["architecture"]
    if name not in MODEL_DATACLASS_REGISTRY:
        raise unknown_architecture(name)
    defaults = MODEL_DATACLASS_REGISTRY[name]()
    chosen = {"_name": name}
    for key, value in config["model"].items():
        if value is not None or hasattr(defaults, key):  # None: not chosen, of a rule not loaded
            chosen[key] = value
    settings = OmegaConf.merge(defaults, chosen)
    layers = max(getattr(settings, "encoder_layers", 0), settings.decoder_layers)
    return fill(lambda: task.build_model(settings), layers, folder, TENSORS_PER_LAYER)


def read_dictionary(path: Path) -> Dictionary:
    """fairseq's dictionary in ``path``. Raises ``UserError`` if it is broken."""
    try:
        return Dictionary.load(str(path))
    except Exception as error:  # fairseq raises bare ones
        reason = " ".join(str(error).split())[:150]
        raise UserError(f"{path} is not a dictionary of fairseq: {reason}") from None


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
    make_subwords = text.SUBWORDS[config["bpe"]]
    split = make_subwords(required(folder, config["subwords"][language]))
    return lambda sentence: split(tokenise(sentence))


def detokeniser(config: dict[str, Any]) -> Callable[[str], str]:
    """A function that turns tokens separated by blanks into plain text of the output's language,
    as the corpus was prepared.
    """
    if config["tokenizer"] == "moses":
        return text.make_detokenise(config["target"] or config["source"])
    return str
