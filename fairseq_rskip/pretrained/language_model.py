"""An exported language model: the probability of plain text, and text drawn from it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask
from torch import Tensor

from fairseq_rskip.errors import UserError
from fairseq_rskip.residual.hooks import cuda_devices

from . import check_positions, required
from .hub import TextModel, build, check_search, read_dictionary

# settings of the model that the task takes, too
OF_TASK = ("tokens_per_sample", "max_target_positions", "add_bos_token")


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


class LanguageModel(TextModel):
    """A trained language model with its corpus's way from plain text to tokens and back."""

    def __init__(
        self, config: dict[str, Any], folder: Path, task: LanguageModelingTask, model: Any
    ):
        super().__init__(config, folder, task, model)
        self.window = int(config["model"]["tokens_per_sample"])

    def translate(self, *arguments: Any, **options: Any) -> str:
        """Raise ``UserError``: fairseq would continue the text."""
        raise UserError(
            "a language model does not translate; it has score(text) and sample(prompt)"
        )

    @torch.no_grad()
    def score(self, document: str, context_window: int = 0) -> Score:
        """The probability of a text of one or more lines, with a blank line after each document.

        Computed as by rskip evaluate, in windows as long as in training, of which up to
        ``context_window`` tokens are only context. Raises ``UserError`` for what is no text, or is
        blank, and for a context that fills the window.
        """
        if not isinstance(document, str) or not document.strip():
            shown = repr(document)[:40]
            raise UserError(f"document={shown}: expected a text of one or more lines, not blank")
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
        searches. Raises ``UserError`` for an option that fairseq does not have, a prompt that is no
        text, or one longer than the model takes.
        """
        check_search(search)
        if not isinstance(prompt, str):
            raise UserError(f"prompt={str(prompt)[:40]}: expected one text")
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


def load(folder: Path, config: dict[str, Any]) -> LanguageModel:
    """The language model that ``config`` describes, with the files in ``folder``. Raises
    ``UserError``.
    """
    path = required(folder, "dict.txt")
    check_positions(folder, config["model"], ["tokens_per_sample", "max_target_positions"])
    settings = {name: config["model"][name] for name in OF_TASK}
    task = LanguageModelingTask(LanguageModelingConfig(**settings), read_dictionary(path))
    return LanguageModel(config, folder, task, build(folder, config, task))
