"""One contender of the Transformer benchmark, in a process of its own.

The process of ``stock`` imports nothing of fairseq_rskip. It therefore gives freed memory back, as
a plain fairseq-train does, where a model of the plugin keeps it.

  python -m benchmarks.contender \
      '{"name": "stock", "size": "tiny", "device": "cpu", "dtype": "fp32"}'

Each line of the standard input names a measurement: training, beam_search, saved_MB or peak_MB. The
answer is a number on a line of the standard output.
"""

import copy
import functools
import json
import resource
import sys
from argparse import Namespace
from typing import Any

import torch
from fairseq import options, tasks, trainer, utils
from fairseq.data import Dictionary, language_pair_dataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from .timing import rate

# name -> features, hidden features, heads, layers of each side, vocabulary, tokens of a batch;
# tiny is Transformer-Tiny of Wu et al. 2021, for Multi30k
SIZES = {
    "quick": (64, 256, 1, 1, 100, 100),
    "tiny": (128, 256, 4, 4, 10000, 4096),
    "small": (256, 1024, 4, 3, 8000, 1500),
    "base": (512, 2048, 8, 6, 32000, 4096),
}
TRAINING = (
    "--share-all-embeddings --criterion label_smoothed_cross_entropy --optimizer adam --lr 1e-4 "
    "--clip-norm 0.1"
)


class Contender:
    """One model with its trainer, generator and batches.

    Args:
        name: ``stock`` or RULE[:VALUE], for example ``xskip_ln:2`` or ``askip_ln:halting``.
        size: a key of ``SIZES``.
        device: ``cpu`` or ``cuda``.
        dtype: ``fp32``, ``fp16`` or ``bf16``.
    """

    def __init__(self, name: str, size: str, device: str, dtype: str):
        rule, _, value = name.partition(":")
        if rule != "stock":
            load_plugin(device)

        *_, vocabulary, tokens = SIZES[size]
        words = Dictionary()
        words.pad_to_multiple_(vocabulary)
        parser = options.get_training_parser()
        arguments = options.parse_args_and_arch(
            parser, command_line(rule, value, size, device, dtype)
        )
        self.config = convert_namespace_to_omegaconf(arguments)
        self.device = device

        utils.set_torch_seed(1)
        self.task = tasks.translation.TranslationTask(self.config.task, words, words)
        model = self.task.build_model(self.config.model)
        criterion = self.task.build_criterion(self.config.criterion)
        self.trainer = trainer.Trainer(self.config, self.task, model, criterion)

        utils.set_torch_seed(1)
        self.to_train = make_batches(words, tokens, device)
        self.to_translate = make_batches(words, tokens // 2, device)

    def training(self) -> float:
        """Target words per second of one step on each batch."""
        return rate(self._train, self.to_train, self.device)

    def _train(self, batches: list[Any]) -> int:
        for batch in batches:
            self.trainer.train_step([batch])
        return sum(batch["ntokens"] for batch in batches)

    def beam_search(self) -> float:
        """Sentences per second of beam-4 search in which every hypothesis has the same length."""
        return rate(self._translate, self.to_translate, self.device)

    def _translate(self, batches: list[Any]) -> int:
        for batch in batches:
            self._generator.generate([], batch)
        return sum(len(batch["id"]) for batch in batches)

    @functools.cached_property
    def _generator(self) -> Any:
        """A generator with a copy of the model: fairseq-generate changes the model it uses."""
        translator = copy.deepcopy(self.trainer.model).eval()
        translator.prepare_for_inference_(self.config)
        return self.task.build_generator([translator], Namespace(beam=4, max_len_b=25, min_len=25))

    def saved_MB(self) -> float:
        """MB that a forward pass of the longest sentences keeps for backward, without weights."""
        kept: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, as_it_is):
            self.trainer.criterion(self.trainer.model, self.to_train[-1])

        sizes = {}
        for tensor in kept:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        for parameter in self.trainer.model.parameters():
            sizes.pop(parameter.untyped_storage().data_ptr(), None)
        return round(sum(sizes.values()) / 1e6, 1)

    def peak_MB(self) -> float:
        """The most MB this process has held: resident memory, or torch's allocations on a GPU."""
        if self.device == "cuda":
            return round(torch.cuda.max_memory_allocated() / 1e6, 1)
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return round(kilobytes * 1024 / 1e6, 1)


def load_plugin(device: str) -> None:
    """Register the architectures and load the operator, as fairseq-train does with --user-dir."""
    import fairseq_rskip.models  # noqa: F401
    from fairseq_rskip.machine import load_operator

    if device == "cpu":
        load_operator()


def command_line(rule: str, value: str, size: str, device: str, dtype: str) -> list[str]:
    """The arguments of fairseq-train."""
    features, hidden, heads, layers, *_ = SIZES[size]
    arch = "transformer" if rule == "stock" else f"transformer_{rule}"
    words = ["none", *TRAINING.split(), "--arch", arch]
    if value:
        words += ["--skip-lambda" if value[0].isdigit() else "--skip-adapt", value]

    for side in ("encoder", "decoder"):
        words += [f"--{side}-embed-dim={features}", f"--{side}-ffn-embed-dim={hidden}"]
        words += [f"--{side}-attention-heads={heads}", f"--{side}-layers={layers}"]

    if device == "cpu":
        words.append("--cpu")
    if dtype != "fp32":
        words.append(f"--{dtype}")
    return words


def make_batches(words: Dictionary, tokens: int, device: str) -> list[Any]:
    """Batches of random words: about ``tokens`` target tokens each, in sentences of up to 40."""
    batches = []
    for longest in (10, 20, 30, 40):
        ids = torch.randint(words.nspecial, len(words), (2, max(1, tokens // longest), longest))
        ids[..., -1] = words.eos()
        lines = []
        for i, (source, target) in enumerate(zip(*ids)):
            lines.append({"id": i, "source": source[i % 5 :], "target": target[i % 4 :]})
        batches.append(language_pair_dataset.collate(lines, words.pad(), words.eos()))
    return utils.move_to_cuda(batches) if device == "cuda" else batches


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # what fairseq prints is no answer
    torch.set_num_threads(1)
    contender = Contender(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        measure = getattr(contender, line.strip())
        print(measure(), file=answers, flush=True)


if __name__ == "__main__":
    main()
