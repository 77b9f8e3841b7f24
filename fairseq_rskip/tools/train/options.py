"""fairseq-train's options as fairseq reads them, checked before anything is trained.

fairseq's own parser and the model's construction refuse what they cannot take; ``RANGES`` has what they wrongly take.
"""

import argparse
import logging
import math
from ast import literal_eval
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fairseq_rskip.errors import UserError, did_you_mean
from fairseq_rskip.tools.corpus import Corpus

RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (  # accepted values in words, their test, options
    ("a number above 0", lambda v: 0 < v < math.inf, "lr adam_eps"),
    ("a number of at least 0", lambda v: 0 <= v < math.inf, "weight_decay clip_norm"),
    ("a number of at least -1", lambda v: -1 <= v < math.inf, "warmup_init_lr stop_min_lr"),
    ("a number from 0 to below 1", lambda v: 0 <= v < 1, "dropout attention_dropout activation_dropout relu_dropout"),
    ("a number from 0 to below 1", lambda v: 0 <= v < 1, "label_smoothing encoder_layerdrop decoder_layerdrop"),
    ("two numbers from 0 to below 1", lambda v: [0 <= b < 1 for b in literal_eval(v)] == [True, True], "adam_betas"),
    ("an integer from 0 to 2^32 - 1", lambda v: 0 <= v < 2**32, "seed"),
    ("an integer of at least 0", lambda v: v >= 0, "max_epoch max_update warmup_updates save_interval_updates"),
    ("an integer of at least 1", lambda v: v >= 1, "max_tokens batch_size update_freq log_interval save_interval"),
    ("an integer of at least 1", lambda v: v >= 1, "validate_interval encoder_layers decoder_layers"),
    ("a folder", lambda v: bool(v.strip()), "save_dir"),
)


class Options:
    """What fairseq's parser makes of the recipe's options and the user's ``words``, which override them.

    ``args``: the namespace; ``model``: the model's settings, defaults included; ``given``: the names of the options in
    ``words``; ``unused``: the recipe's options that do not exist here, such as --adam-betas with --optimizer sgd.
    Raises ``UserError`` for what fairseq-train refuses.
    """

    def __init__(self, arch: str, recipe: dict[str, Any], words: list[str]):
        from fairseq import options
        from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY

        import fairseq_rskip.models  # noqa: F401  (registers the architectures)

        def refuse(message: str) -> None:
            if "--arch/-a" in message:
                message = (
                    f"no architecture named {arch!r}; {did_you_mean(arch, ARCH_MODEL_REGISTRY)} --archs lists them"
                )
            raise UserError(message.replace("argument ", "", 1).replace("<lambda> ", ""))

        ours = {f"--{name}" if value is True else f"--{name}={value}": name for name, value in recipe.items()}
        try:
            parser = options.get_training_parser()
            parser.error = refuse
            all_words = ["data", f"--arch={arch}", *ours, *words]
            self.args, extra = options.parse_args_and_arch(parser, all_words, parse_known=True)
        except (OSError, ImportError) as error:
            raise UserError(f"cannot load --user-dir: {error}") from None
        actions = parser._option_string_actions
        if unknown := [word for word in extra if word not in ours]:
            hint = did_you_mean(unknown[0].partition("=")[0], actions)
            raise UserError(f"{arch} takes no option {' '.join(unknown)}; {hint or 'fairseq-train --help lists them'}")
        flags = (word.partition("=")[0] for word in words)
        self.given = {actions[flag].dest for flag in flags if flag in actions}
        self.unused = {ours[word] for word in extra}
        if "arch" in self.given:
            raise UserError("--arch is given twice: ARCH is the second argument")
        kind = MODEL_DATACLASS_REGISTRY.get(arch)  # of which fairseq's parser leaves the defaults out
        values = {name: value for name, value in vars(self.args).items() if value is not None or not kind}
        defaults = {k: None if str(v).startswith("${") else v for k, v in (vars(kind()) if kind else {}).items()}
        self.model = argparse.Namespace(**{**defaults, **values})  # ${...} refers to what is not given
        for expected, accepts, names in RANGES:
            for name in self.given & set(names.split()):
                self._check(name, expected, accepts)

    def _check(self, name: str, expected: str, accepts: Callable[[Any], bool]) -> None:
        value = getattr(self.args, name)
        try:
            accepted = all(map(accepts, value if isinstance(value, list) else [value]))
        except (ValueError, SyntaxError, TypeError):
            accepted = False
        if not accepted:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected {expected}")

    def get(self, name: str) -> Any:
        """The value of an option that the user gave, else None."""
        return getattr(self.args, name) if name in self.given else None

    def keeps(self, name: str) -> bool:
        """Whether an option of the recipe applies: the user gave neither it nor, for a length, the other unit."""
        same = {"max_update", "max_epoch"} if name in ("max-update", "max-epoch") else {name.replace("-", "_")}
        return name not in self.unused and not same & self.given


def check_model(arch: str, options: Options, corpus: Corpus, joined: bool, share: bool) -> None:
    """Build the model as fairseq-train will, with one layer on each side. Raises ``UserError`` where that fails, and
    where it is not of the corpus's kind."""
    from fairseq import models
    from fairseq.data import Dictionary

    if issubclass(models.ARCH_MODEL_REGISTRY[arch], models.FairseqLanguageModel) != corpus.is_text:
        kinds = ("has two languages", "a translation model"), ("is a text", "a language model, transformer_lm_…")
        holds, expected = kinds[corpus.is_text]
        raise UserError(f"{corpus.name} {holds}: expected {expected}, not {arch}; --archs lists them")
    values = {**vars(options.model), "_name": arch}
    values["share_all_embeddings"] = share or "share_all_embeddings" in options.given
    small = {"encoder_layers": 1, "decoder_layers": 1, "adaptive_input_cutoff": "2,4", "adaptive_softmax_cutoff": "2,4"}
    values |= {name: value for name, value in small.items() if values.get(name)}  # of the eight words below
    source, target = Dictionary(), Dictionary()
    for word in "abcd":
        source.add_symbol(word)
        target.add_symbol(word if joined else word * 2)
    logging.disable()  # fairseq-train repeats it, about the whole model
    try:  # a model wants no more of the task; without data, nothing is profiled
        task = SimpleNamespace(source_dictionary=source, target_dictionary=target)
        models.build_model(argparse.Namespace(**values), task)
    except UserError:
        raise
    except Exception as error:  # fairseq checks with assert
        raise UserError(f"fairseq cannot build {arch} with these options: {error or type(error).__name__}") from None
    finally:
        logging.disable(logging.NOTSET)
