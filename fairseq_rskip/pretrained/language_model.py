"""An exported language model: the probability of plain text, and text drawn from it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.dataclass.configs import FairseqConfig, GenerationConfig
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from omegaconf import OmegaConf
from torch import Tensor

import fairseq_rskip.models  # noqa: F401  (registers the architectures)
from fairseq_rskip.compat import unknown_architecture
from fairseq_rskip.errors import UserError
from fairseq_rskip.residual.profile import cuda_devices

from . import check_positions, fill, required, text
from .translation import TENSORS_PER_LAYER, detokeniser, splitter


@dataclass(frozen=True)
class Score:
    """The tokens of a text (line ends are tokens), the natural log-probability of each, and the
    text's bytes.
    """

    tokens: list[str]
    log_probabilities: Tensor
    bytes: int

    @property
    def bits(self) -> float:
        return -float(self.log_probabilities.double().sum()) / math.log(2)

    @property
    def perplexity(self) -> float:
        """Per token."""
        return 2 ** (self.bits / len(self.tokens))

    @property
    def bits_per_byte(self) -> float:
        return self.bits / self.bytes


class LanguageModel(GeneratorHubInterface):
    """A trained language model with its corpus's way from plain text to tokens and back.

    ``config`` is the content of config.json, ``folder`` holds dictionary and subwords.
    """

    def __init__(
        self, config: dict[str, Any], folder: Path, task: LanguageModelingTask, model: Any
    ):
        cfg = OmegaConf.structured(FairseqConfig)
        cfg.generation = OmegaConf.merge(cfg.generation, config["search"])
        super().__init__(cfg, task, [model])
        self.config = config
        self.window = int(config["model"]["tokens_per_sample"])
        self.to_tokens = splitter(config, folder)
        self.from_tokens = detokeniser(config, config["source"])

    def translate(self, *arguments: Any, **options: Any) -> str:
        """Raise ``UserError``: fairseq would continue the text."""
        raise UserError(
            "a language model does not translate; it has score(text) and sample(prompt)"
        )

    @torch.no_grad()
    def score(self, document: str, context_window: int = 0) -> Score:
        """The probability of a text of one or more lines, with a blank line after each document.

        Computed as by rskip evaluate, in windows as long as in training, of which up to
        ``context_window`` tokens are only context. Raises ``UserError`` for a context that fills
        the window.
        """
        if not 0 <= context_window < self.window:
            raise UserError(
                f"context_window={context_window}: expected an integer from 0 to {self.window - 1}"
            )
        lines = document.removesuffix("\n").split("\n")
        targets = torch.cat([self.encode(line) for line in lines]).to(self.device)
        inputs = torch.cat([targets.new_tensor([self.src_dict.eos()]), targets[:-1]])
        log_probabilities = []
        step = self.window - context_window
        for start in range(0, len(targets), step):
            window = slice(max(0, start - context_window), start + step)
            of_window = self._log_probabilities(inputs[window], targets[window])
            log_probabilities.append(of_window[start - window.start :])
        size = sum(len(line.encode()) + 1 for line in lines)
        tokens = [self.src_dict[int(token)] for token in targets]
        return Score(tokens, torch.cat(log_probabilities), size)

    def _log_probabilities(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The log-probability of each of ``targets``, ``(T,)``, after those of ``inputs``, in fp32
        on the CPU.
        """
        model = self.models[0]
        bos = targets.new_tensor([])
        if self.task.args.add_bos_token:  # as in training
            bos = targets.new_tensor([self.src_dict.bos()])
        output = model(torch.cat([bos, inputs])[None])
        sample = {"target": torch.cat([bos, targets])[None]}
        scores = model.get_normalized_probs(output, log_probs=True, sample=sample)
        of_targets = scores[0, len(bos) :].gather(1, targets[:, None])
        return of_targets[:, 0].float().cpu()

    def sample(
        self, prompt: str = "", seed: int | None = None, verbose: bool = False, **search: Any
    ) -> str:
        """The line that begins with ``prompt``, up to its end, each token drawn from the model's
        probabilities.

        ``search``: fairseq-generate's ``sampling_topk``, ``sampling_topp``, ``temperature``,
        ``max_len_b`` (100 tokens behind the prompt) and others; ``sampling=False, beam=4``
        searches. Raises ``UserError`` for an option that fairseq does not have, or a prompt longer
        than the model takes.
        """
        unknown = sorted(set(search) - set(GenerationConfig.__dataclass_fields__))
        if unknown:
            raise UserError(f"fairseq has no option {', '.join(unknown)} of its search")
        tokens = self.encode(prompt)
        if len(tokens) >= self.max_positions:
            raise UserError(
                f"the prompt has {len(tokens)} tokens, the model takes {self.max_positions - 1}"
            )
        beam = search.pop("beam", self.cfg.generation.beam)
        with torch.random.fork_rng(cuda_devices(self)):
            torch.manual_seed(torch.seed() if seed is None else seed)
            best = self.generate([tokens], beam, verbose, **search)[0][0]
        return self.decode(best["tokens"])

    def encode(self, sentence: str) -> Tensor:
        """Token numbers of a line of plain text, its end included."""
        return self.binarize(self.to_tokens(sentence))

    def decode(self, tokens: Tensor) -> str:
        """Plain text of token numbers: subwords joined, and detokenised where the corpus was
        tokenised.
        """
        words = self.tgt_dict.string(tokens, text.POST_PROCESS[self.config["bpe"]])
        return self.from_tokens(words)


def load(folder: Path, config: dict[str, Any]) -> LanguageModel:
    """The language model that ``config`` describes, with the files in ``folder``. Raises
    ``UserError``.
    """
    name = config["architecture"]
    path = required(folder, "dict.txt")
    check_positions(folder, config["model"], ["tokens_per_sample", "max_target_positions"])
    if name not in MODEL_DATACLASS_REGISTRY:
        raise unknown_architecture(name)
    settings = OmegaConf.merge(MODEL_DATACLASS_REGISTRY[name](), {**config["model"], "_name": name})
    try:
        dictionary = Dictionary.load(str(path))
    except Exception as error:  # fairseq raises bare ones
        raise UserError(
            f"{path} is not a dictionary of fairseq: {' '.join(str(error).split())[:150]}"
        ) from None
    task_settings = {
        name: config["model"][name]
        for name in ("tokens_per_sample", "max_target_positions", "add_bos_token")
    }
    task = LanguageModelingTask(LanguageModelingConfig(**task_settings), dictionary)
    layers = settings.decoder_layers
    model = fill(lambda: task.build_model(settings), layers, folder, TENSORS_PER_LAYER)
    return LanguageModel(config, folder, task, model)
